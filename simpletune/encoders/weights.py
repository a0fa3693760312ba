"""Load an encoder's parts from its folder with transformers, and refuse folders that are not whole."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from simpletune.encoders.encoder import About
from simpletune.options import UserError, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model")
"""Files that hold a tokenizer's words."""


def complete(kind: type[PreTrainedModel], about: About, **options: object) -> PreTrainedModel:
    """Load a model in fp32, frozen.

    Raises:
        UserError: weights are missing, have other shapes than the configuration, or cannot be read.
    """
    from safetensors import SafetensorError

    with quiet():
        try:
            model, info = kind.from_pretrained(
                about.folder, dtype=torch.float32, use_safetensors=True, local_files_only=True,
                output_loading_info=True, ignore_mismatched_sizes=True, **options,
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise _damaged(about, f"cannot be loaded ({str(error).splitlines()[0]})") from None
    if info["missing_keys"]:
        lacking = sorted(info["missing_keys"])
        raise _damaged(about, f"lacks {len(lacking)} weights of its model ({shortened(lacking, 3)})")
    if info["mismatched_keys"]:
        other = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])
        raise _damaged(about, f"has weights of other shapes than config.json says ({shortened(other, 3)})")
    return model.eval().requires_grad_(False)


def empty_model(
    kind: type[PreTrainedModel], config: type[PretrainedConfig], about: About, **options: object
) -> PreTrainedModel:
    """Build a model from its configuration with uninitialised weights, on torch's current device.

    Raises:
        UserError: the configuration does not describe such a model.
    """
    from transformers.initialization import no_init_weights

    try:
        read = config.from_pretrained(about.folder, local_files_only=True)
        build = getattr(kind, "from_config", None) or kind
        with no_init_weights():  # drawing truncated normals does not end with fake tensors
            return build(read, **options).eval().requires_grad_(False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(about, f"has a damaged config.json ({str(error).splitlines()[0]})") from None


def tokenizer_of(about: About) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Raises:
        UserError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    if not any((about.folder / name).is_file() for name in TOKENIZERS):  # transformers would make one without words
        raise _damaged(about, f"has no usable tokenizer (none of {', '.join(TOKENIZERS)})")
    with quiet():
        try:
            return AutoTokenizer.from_pretrained(about.folder, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(about, f"has no usable tokenizer ({str(error).splitlines()[0]})") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing progress and tables of keys: this module reports them itself."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _damaged(about: About, what: str) -> UserError:
    return UserError(f"{about.option}: {about.folder} {what}. Download it again, or name another encoder")
