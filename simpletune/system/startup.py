"""Import the heavy libraries (torch, transformers, peft, diffusers) faster: without bitsandbytes or collections.

Three things waste seconds: peft and diffusers import bitsandbytes if it is installed, and with it torch's compiler;
Python collects garbage repeatedly during imports, which create hardly any; and every later collection traverses all
imported objects.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BITSANDBYTES = "bitsandbytes"
REMEMBER_IT = ("accelerate", "diffusers", "peft", "transformers")  # look for it once, and import it much later


def import_libraries() -> None:
    """Import the heavy libraries and exclude their objects from later garbage collections.

    Hides bitsandbytes from peft and diffusers, so their quantisers that use it are not available in this process; our
    own quantisers and its optimizers import it on demand. If one of these libraries was imported before, nothing is
    hidden, and the start takes a second longer.
    """
    with pause_collection(), _hide_bitsandbytes():
        import accelerate  # noqa: F401
        import peft  # noqa: F401
        from diffusers import SD3Transformer2DModel  # noqa: F401  # autoencoders are imported on demand
        from peft.import_utils import is_bnb_available

        is_bnb_available()  # peft caches the answer; otherwise it would import bitsandbytes when attaching a LoRA
        freeze()  # before collection resumes and traverses everything


def ensure_libraries() -> None:
    """Import the heavy libraries unless they are in use: what uses them must not be frozen."""
    if not libraries_loaded():
        import_libraries()


def libraries_loaded() -> bool:
    """Return whether the heavy libraries have been imported."""
    return REMEMBER_IT[-1] in sys.modules


def freeze() -> None:
    """Exclude all live objects from later garbage collections.

    Freeing imported objects at exit takes as long as importing peft. GPU libraries check for leaks at exit, so GPU
    builds of torch unfreeze first.
    """
    import torch

    gc.freeze()
    if torch.version.cuda or torch.version.hip:
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)


@contextmanager
def _hide_bitsandbytes() -> Iterator[None]:
    """Make importing or finding bitsandbytes fail within this context, unless a library may have found it already."""
    if any(name in sys.modules for name in (BITSANDBYTES, *REMEMBER_IT)):
        yield  # diffusers would import what it has found, and fail
        return
    sys.modules[BITSANDBYTES] = None  # type: ignore[assignment]  # import and find_spec treat None as missing
    try:
        yield
    finally:
        del sys.modules[BITSANDBYTES]


@contextmanager
def pause_collection() -> Iterator[None]:
    """Disable garbage collection within this context, because its timing is random and affects peak memory."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
