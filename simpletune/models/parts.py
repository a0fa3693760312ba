"""One part of a pipeline, wherever it lies: a folder in diffusers' layout, or inside a single file; and loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletune.models.single_file import PREFIXES, open_file
from simpletune.models.weights import fingerprint
from simpletune.options import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

LISTED = 8


@lru_cache(maxsize=1)
def bundled_configs() -> dict[str, dict[str, Any]]:
    """SD3 Medium's configurations of what a single file holds without one: autoencoder, text encoders, scheduler."""
    return json.loads((Path(__file__).parent / "sd3_medium_parts.json").read_text())


@dataclass(frozen=True)
class Part:
    """Where a part's configuration and weights are.

    Args:
        name: ``vae``, ``text_encoder``, ``tokenizer_2``, ``scheduler``, ...
        folder: of its files; None: the configuration is the bundled one.
        file: the single file that holds the weights; None: they lie in the folder.
    """

    name: str
    folder: Path | None
    file: Path | None = None

    @property
    def place(self) -> str:
        """Where the weights are, for messages."""
        return f"{self.name} in {self.file}" if self.file else str(self.folder)

    def config(self) -> dict[str, Any]:
        """The part's ``config.json`` (of the scheduler ``scheduler_config.json``), or SD3 Medium's own.

        Raises:
            UserError: it cannot be read.
        """
        if self.folder is None:
            return bundled_configs()[self.name]
        file = self.folder / ("scheduler_config.json" if self.name == "scheduler" else "config.json")
        try:
            return json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}). It describes the {self.name}") from None

    def fingerprint(self) -> str:
        """A short name for the part's content: configuration and weights."""
        if self.file is None:
            assert self.folder is not None
            return fingerprint(self.folder)
        import hashlib

        config = json.dumps(self.config(), sort_keys=True)
        return hashlib.sha256((config + open_file(self.file).fingerprint(self.name)).encode()).hexdigest()[:16]


def load_autoencoder(part: Part, dtype: torch.dtype) -> nn.Module:
    """The autoencoder (AutoencoderKL, or AutoencoderTiny) on the CPU.

    Raises:
        UserError: it is of another class, or weights and configuration do not fit.
    """
    import diffusers

    config = part.config()
    name = config.get("_class_name")
    if name not in ("AutoencoderKL", "AutoencoderTiny"):
        raise UserError(f"model.vae: {part.place} holds a {name}; SD3 needs an AutoencoderKL or AutoencoderTiny")
    if part.file is None:
        return getattr(diffusers, name).from_pretrained(part.folder, dtype=dtype, local_files_only=True)
    from accelerate import init_empty_weights
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    original = {PREFIXES["vae"] + key: tensor for key, tensor in open_file(part.file).read("vae").items()}
    with init_empty_weights():
        vae = diffusers.AutoencoderKL.from_config(config)
    tensors = {key: tensor.to(dtype, copy=True) for key, tensor in convert_ldm_vae_checkpoint(original, config).items()}
    _require_fit(part, {key: tensor.shape for key, tensor in vae.state_dict().items()}, tensors)
    vae.load_state_dict(tensors, assign=True)
    return vae


def load_text_model(part: Part, dtype: torch.dtype) -> Any:
    """A text encoder (CLIPTextModelWithProjection, or T5EncoderModel) on the CPU.

    Raises:
        UserError: weights and configuration do not fit.
    """
    from accelerate import init_empty_weights
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    is_t5 = part.name == "text_encoder_3"
    kind, kind_of_config = (T5EncoderModel, T5Config) if is_t5 else (CLIPTextModelWithProjection, CLIPTextConfig)
    if part.file is None:
        return kind.from_pretrained(part.folder, dtype=dtype, local_files_only=True, use_safetensors=True)
    config = kind_of_config.from_dict(part.config())
    tensors = _text_tensors(part)
    with init_empty_weights():
        shapes = {key: tensor.shape for key, tensor in kind(config).state_dict().items()}
    tied = {"encoder.embed_tokens.weight"}  # T5's own name for shared.weight
    _require_fit(part, {key: shape for key, shape in shapes.items() if key not in tied}, tensors)
    return kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)


def _text_tensors(part: Part) -> dict[str, Tensor]:
    """A text encoder's tensors under transformers' names, in the types they have on disk.

    The original CLIP-L comes without a projection; it is the identity (diffusers' and ComfyUI's rule).
    """
    import torch

    assert part.file is not None
    read = open_file(part.file).read(part.name)
    unused = ("position_ids", "logit_scale", "encoder.embed_tokens.weight")
    tensors = {key: tensor for key, tensor in read.items() if not key.endswith(unused)}
    if part.name == "text_encoder" and "text_projection.weight" not in tensors:
        width = tensors["text_model.embeddings.token_embedding.weight"].shape[1]
        tensors["text_projection.weight"] = torch.eye(width)
    return tensors


def _require_fit(part: Part, shapes: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Names and shapes in the file against those in the configuration."""
    missing, odd = sorted(set(shapes) - set(tensors)), sorted(set(tensors) - set(shapes))
    sized = [key for key in shapes if key in tensors and tensors[key].shape != shapes[key]]
    found = {"missing": missing, "unexpected": odd, "of another shape": sized}
    listed = [f"{title}: {', '.join(names[:LISTED])}" for title, names in found.items() if names]
    if listed:
        raise UserError(
            f"{part.place} does not fit its configuration ({part.folder or 'SD3 Medium, bundled'}). "
            f"{'; '.join(listed)}. Give model.text_encoders a folder with the configs that belong to the file"
        )
