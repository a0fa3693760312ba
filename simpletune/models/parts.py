"""One part of a pipeline, wherever it lies: a folder in diffusers' layout, or inside a single file; and loading it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletune.models.config_limits import read_config
from simpletune.models.sd3_shapes import ModelConfig
from simpletune.models.single_file import PREFIXES, open_file
from simpletune.options import UserError, shortened
from simpletune.system.model_folder import fingerprint, weight_files
from simpletune.system.safetensors_file import read_header

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@lru_cache(maxsize=1)
def bundled_configs() -> Mapping[str, ModelConfig]:
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

    def config(self) -> ModelConfig:
        """The part's ``config.json`` (of the scheduler ``scheduler_config.json``), or SD3 Medium's own.

        Raises:
            UserError: it cannot be read, or names sizes that no model has.
        """
        if self.folder is None:
            return bundled_configs()[self.name]
        file = self.folder / ("scheduler_config.json" if self.name == "scheduler" else "config.json")
        return read_config(file, self.name)

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
    from accelerate import init_empty_weights

    if part.file is None:
        kind = getattr(diffusers, name)
        with loading(part):
            with init_empty_weights():
                expected = _shapes(kind.from_config(config).state_dict())
            _require_weights(part, expected)
            return kind.from_pretrained(part.folder, dtype=dtype, local_files_only=True, use_safetensors=True)
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    original = {PREFIXES["vae"] + key: tensor for key, tensor in open_file(part.file).read("vae").items()}
    with init_empty_weights():
        vae = diffusers.AutoencoderKL.from_config(config)
    tensors = {key: tensor.to(dtype, copy=True) for key, tensor in convert_ldm_vae_checkpoint(original, config).items()}
    require_tensor_shapes(part, _shapes(vae.state_dict()), _shapes(tensors))
    vae.load_state_dict(tensors, assign=True)
    return vae


def use_tiles(vae: Any, pixels: int) -> None:
    """Let an autoencoder take pictures larger than a tile in tiles that overlap by a quarter, blended (diffusers').

    AutoencoderTiny is left as it is: diffusers' tiles for its encoder hold 4 latent channels, and SD3 has 16.

    Args:
        vae: AutoencoderKL or AutoencoderTiny.
        pixels: the side of a tile.
    """
    from diffusers import AutoencoderTiny

    if isinstance(vae, AutoencoderTiny):
        return
    vae.enable_tiling()
    vae.tile_sample_min_size = pixels
    vae.tile_latent_min_size = pixels // 2 ** (len(vae.config.block_out_channels) - 1)


def load_text_model(part: Part, dtype: torch.dtype) -> Any:
    """A CLIP text encoder (CLIPTextModelWithProjection) on the CPU; T5 is read layer by layer (t5_layers.py).

    Its weights are copied out of the mapped file: a product of one row picks its kernel by the weight's address, so
    that a prompt's last bits would depend on where in its file the weight lies.

    Raises:
        UserError: weights and configuration do not fit.
    """
    from accelerate import init_empty_weights
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kind = CLIPTextModelWithProjection
    with loading(part), init_empty_weights():
        config = CLIPTextConfig.from_dict(part.config())
        expected = _shapes(kind(config).state_dict())
    if part.file is None:
        with loading(part):
            _require_weights(part, expected)
            return _copied(kind.from_pretrained(part.folder, dtype=dtype, local_files_only=True, use_safetensors=True))
    tensors = _clip_tensors(part)
    require_tensor_shapes(part, expected, _shapes(tensors))
    return _copied(kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype))


def _copied(model: nn.Module) -> nn.Module:
    """The model with its parameters in memory of their own, which torch aligns; one at a time."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _clip_tensors(part: Part) -> dict[str, Tensor]:
    """A CLIP encoder's tensors under transformers' names, in the types they have on disk.

    The original CLIP-L comes without a projection; it is the identity (diffusers' and ComfyUI's rule).
    """
    import torch

    assert part.file is not None
    read = open_file(part.file).read(part.name)
    unused = ("position_ids", "logit_scale")
    tensors = {key: tensor for key, tensor in read.items() if not key.endswith(unused)}
    if part.name == "text_encoder" and "text_projection.weight" not in tensors:
        width = tensors["text_model.embeddings.token_embedding.weight"].shape[1]
        tensors["text_projection.weight"] = torch.eye(width)
    return tensors


@contextmanager
def loading(part: Part) -> Iterator[None]:
    """What is raised while a part is built from its configuration or read from its files, in words.

    Raises:
        UserError: they do not fit each other, or are damaged.
    """
    from huggingface_hub.errors import StrictDataclassError

    odd = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
    try:
        yield
    except (*odd, StrictDataclassError) as error:
        said = str(error).strip().partition("\n")[0][:300]
        raise UserError(
            f"{part.place} cannot be loaded ({type(error).__name__}: {said}). Its files are damaged, or do not belong "
            "together. Fetch it again"
        ) from error


def _require_weights(part: Part, expected: Mapping[str, torch.Size]) -> None:
    """Names and shapes in a folder's headers against its configuration's, before anything of that size is allocated."""
    assert part.folder is not None
    headers = [read_header(file) for file in weight_files(part.folder)]
    found = {name: tuple(entry["shape"]) for header in headers for name, entry in header.items() if name in expected}
    require_tensor_shapes(part, expected, found)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def require_tensor_shapes(part: Part, expected: Mapping[str, torch.Size], found: Mapping[str, tuple[int, ...]]) -> None:
    """Names and shapes in the file against those in the configuration.

    Raises:
        UserError: they differ.
    """
    missing, odd = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    sized = [key for key in expected if key in found and found[key] != expected[key]]
    kinds = {"missing": missing, "unexpected": odd, "of another shape": sized}
    listed = [f"{title}: {shortened(names)}" for title, names in kinds.items() if names]
    if listed:
        of_file = "Give model.text_encoders a folder with the configs that belong to the file"
        remedy = of_file if part.file else "Fetch it again"
        raise UserError(
            f"{part.place} does not fit its configuration ({part.folder or 'SD3 Medium, bundled'}). "
            f"{'; '.join(listed)}. {remedy}"
        )
