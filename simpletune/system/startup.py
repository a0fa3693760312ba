"""The heavy imports (torch, transformers, peft, diffusers), without what a run does not use and without collecting.

Three things take seconds and give nothing. peft and diffusers import bitsandbytes where it is installed, and with it
torch's compiler. Python collects garbage again and again while modules are made, where there is hardly any. And every
later collection looks through all that was imported.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

HIDDEN = "bitsandbytes"


def import_libraries() -> None:
    """Import the heavy libraries; what they have made is left out of later collections.

    To peft and diffusers bitsandbytes looks as if it were not installed, unless it was imported before: their own
    quantisers by it are not there in this process. Ours, and its optimizers, import it when they are asked for.
    """
    with without_collection(), _hidden(HIDDEN):
        import accelerate  # noqa: F401
        import peft  # noqa: F401
        from diffusers import SD3Transformer2DModel  # noqa: F401  # autoencoders: where pictures go through one
        from peft.import_utils import is_bnb_available

        is_bnb_available()  # peft remembers the answer; it would import bitsandbytes when a LoRA is attached
        freeze()  # before collecting is on again: it would begin with all of it


def freeze() -> None:
    """Leave all that is alive out of later collections.

    Taking apart what was imported when the process ends costs as much as importing peft. Libraries for GPUs look for
    what they leak then: with a torch that is built for one, nothing is left out at the end.
    """
    import torch

    gc.freeze()
    if torch.version.cuda or torch.version.hip:
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Importing a module fails, and it is not found, as long as the context lasts."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # what import and find_spec take for not there
    try:
        yield
    finally:
        del sys.modules[module]


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection meanwhile: when it happens is chance, and what waits for it takes memory until then."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
