"""Load a model and a tokenizer of transformers from a folder, and refuse incomplete folders.

Reads safetensors and JSON only, never pickles, and runs no code from a folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletune.system import strict_json
from simpletune.system.hub import is_hub_name, model_folder
from simpletune.system.options import Json, UserError, join_names
from simpletune.system.printable import first_line
from simpletune.system.safetensors_file import conversion_command

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model")
"""Files that hold a tokenizer's words."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
CONFIG_BYTES, CONFIG_VALUES = 2**22, 200_000  # some list each of 20,000 labels


@dataclass(frozen=True)
class ModelFolder:
    """A folder in transformers' layout."""

    folder: Path  # where its files are
    option: str  # the command-line option that named it, for messages
    what: str  # what the user calls the model, such as ``encoder``

    def damaged(self, reason: str) -> UserError:
        return UserError(f"{self.option}: {self.folder} {reason}. Download it again, or name another {self.what}")

    def config(self) -> Json:
        """Read config.json. Raises UserError if it cannot be read."""
        file = self.folder / "config.json"
        try:
            found = strict_json.read(file, CONFIG_BYTES, CONFIG_VALUES)
        except (OSError, strict_json.JsonError) as error:
            raise UserError(f"{self.option}: {file} is damaged ({error}). Download it again") from None
        return found if isinstance(found, dict) else {}

    def model_type(self, known: Collection[str], examples: str) -> str:
        """Return the ``model_type`` of config.json. Raises UserError if it is not among the known ones, of which the
        message names ``examples`` on the Hub."""
        found = self.config().get("model_type")
        if not isinstance(found, str) or found not in known:
            raise UserError(
                f"{self.option}: {self.folder} is a {found} model. Use one of {', '.join(known)}, such as {examples}"
            )
        return found

    def refuse_pickles(self) -> None:
        """Raise UserError if the folder's only weights are pickles."""
        pickles = sorted(file.name for file in self.folder.iterdir() if file.suffix in PICKLES)
        if pickles and not any(self.folder.glob("*.safetensors")):
            raise UserError(
                f"{self.option}: {self.folder} has only {', '.join(pickles)}. A pickle can run code when it is read: "
                f"use a copy with model.safetensors, or convert it: {conversion_command(self.folder / pickles[0])}"
            )

    def model(self, kind: type[PreTrainedModel], dtype: torch.dtype, **options: object) -> PreTrainedModel:
        """Load a model on the CPU, frozen; weights of the same type on disk stay in the file until they are read.
        Raises UserError if weights are missing, have other shapes than the configuration, or cannot be read."""
        from safetensors import SafetensorError

        with quiet():
            try:
                model, info = kind.from_pretrained(
                    self.folder, dtype=dtype, use_safetensors=True, local_files_only=True,
                    output_loading_info=True, ignore_mismatched_sizes=True, **options,
                )  # fmt: skip
            except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
                raise self.damaged(f"cannot be loaded ({first_line(error)})") from None
        if info["missing_keys"]:
            lacking = sorted(info["missing_keys"])
            raise self.damaged(f"lacks {len(lacking)} weights of its model ({join_names(lacking, 3)})")
        if info["mismatched_keys"]:
            other = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])
            raise self.damaged(f"has weights whose shapes differ from config.json ({join_names(other, 3)})")
        return model.eval().requires_grad_(False)

    def empty(self, kind: Any, config: type[PretrainedConfig], **options: object) -> PreTrainedModel:
        """Build a model from its configuration with uninitialised weights, on torch's current device. Raises UserError
        if the configuration does not describe such a model."""
        from transformers.initialization import no_init_weights

        try:
            read = config.from_pretrained(self.folder, local_files_only=True)
            build = getattr(kind, "from_config", None) or kind
            with no_init_weights():  # with fake tensors, drawing truncated normals never ends
                model: PreTrainedModel = build(read, **options).eval().requires_grad_(False)
                return model
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.damaged(f"has a damaged config.json ({first_line(error)})") from None

    def tokenizer(self, **options: object) -> PreTrainedTokenizerBase:
        """Load the tokenizer. Raises UserError if it cannot be loaded."""
        from transformers import AutoTokenizer

        if not any((self.folder / name).is_file() for name in TOKENIZERS):  # transformers would make an empty one
            raise self.damaged(f"has no usable tokenizer (none of {', '.join(TOKENIZERS)})")
        with quiet():
            try:
                return AutoTokenizer.from_pretrained(
                    self.folder, local_files_only=True, trust_remote_code=False, **options
                )
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise self.damaged(f"has no usable tokenizer ({first_line(error)})") from None


def find_folder(name: str, option: str, what: str, example: str) -> ModelFolder:
    """Find a model by its folder or hub name, for example ``example``; fetch it if necessary (see ``ModelFolder``).
    Raises UserError if there is no such model."""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            held = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
            raise UserError(
                f"{option}: {folder} has no config.json, only {held}. Name a folder of transformers' layout"
            )
        return ModelFolder(folder, option, what)
    if is_hub_name(name):
        return ModelFolder(model_folder(name), option, what)
    raise UserError(f"{option}: {name} does not exist. Give a folder or a hub name, such as {example}")


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
