"""Locate and load one part of a pipeline, from a folder in diffusers' layout or from a single file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletune.models.shared.model_config import ModelConfig, read_config
from simpletune.models.shared.single_file import FileLayout, SingleFile, open_file
from simpletune.system.model_folder import files_hash, fingerprint, variant_of, weight_files
from simpletune.system.options import UserError, join_names
from simpletune.system.safetensors_file import read_header

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


LDM_VAE = "first_stage_model."  # the prefix that diffusers' converter expects
OLD_ATTENTION = re.compile(r"(?<=\.attentions\.\d\.)(query|key|value|proj_attn)(?=\.)")
NEW_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
BATCH = 1  # prompts encoded together; with more, the last bits of a prompt's embedding would depend on its neighbours
CHUNK_BYTES = 2**30  # of T5's hidden states in host memory; beyond it, layers are loaded once for each chunk of prompts
GROUP = 64  # numbers of a packed token with one scale


@dataclass(frozen=True)
class Part:
    """The location of a part's configuration and weights."""

    name: str  # ``vae``, ``text_encoder``, ``tokenizer_2``, ``scheduler``, ...
    folder: Path | None  # the folder of its files; None uses the bundled configuration
    file: Path | None = None  # the single file with the weights; None if they are in the folder
    layout: FileLayout | None = None
    bundled: ModelConfig | None = None  # the configuration of a part without a folder, which ships with this package

    @property
    def place(self) -> str:
        """The location of the weights, for messages."""
        return f"{self.name} in {self.file}" if self.file else str(self.folder)

    def single_file(self) -> SingleFile:
        """The single file with the weights. UserError: it is damaged."""
        assert self.file is not None and self.layout is not None
        return open_file(self.file, self.layout)

    def config(self) -> ModelConfig:
        """The part's ``config.json`` (the scheduler's ``scheduler_config.json``), or the bundled one.

        Raises:
            UserError: it cannot be read, or contains a size beyond the limits.
        """
        if self.folder is None:
            assert self.bundled is not None
            return self.bundled
        file = self.folder / ("scheduler_config.json" if self.name == "scheduler" else "config.json")
        return read_config(file, self.name)

    def fingerprint(self, sums: Path | None = None) -> str:
        """A short hash of the part's configuration and of every byte of its weights, the same wherever they lie: what
        caches and checkpoints know it by. ``sums``: the cache that keeps checksums of large files, if any."""
        if self.name.startswith("tokenizer"):
            assert self.folder is not None  # single files never contain tokenizers
            return files_hash(self.folder)
        if self.name != "scheduler" and self.file is None:
            assert self.folder is not None
            return fingerprint(self.folder, sums)
        import hashlib

        is_denoiser = self.layout is not None and self.name == self.layout.denoiser
        config = json.dumps(self.single_file().denoiser_config if is_denoiser else self.config(), sort_keys=True)
        weights = "" if self.file is None else self.single_file().fingerprint(self.name, sums)
        return hashlib.sha256((config + weights).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder with the names of its parts in a pipeline's folder."""

    name: str  # names its cache
    tokenizer: str  # the part with its tokenizer
    model: str  # the part with its weights
    title: str  # its name in messages
    length: int | None = None  # tokens of a padded prompt; None: the tokenizer's maximum
    is_t5: bool = False  # whether it is a T5 encoder rather than a CLIP one
    packed: bool = False  # whether its hidden states are cached in int8
    projected: bool = False  # whether it is CLIP with a projection, whose pooled output is used
    penultimate: bool = False
    """Whether CLIP's penultimate hidden state is used, rather than the last one after the final norm."""


def autoencoder_config(part: Part) -> ModelConfig:
    """The autoencoder's configuration. UserError: it has another class, or latents with other statistics."""
    config = part.config()
    name = config.get("_class_name")
    if name not in ("AutoencoderKL", "AutoencoderTiny"):
        raise UserError(f"model.vae: {part.place} is a {name}; the model needs an AutoencoderKL or AutoencoderTiny")
    if config.get("latents_mean") is not None or config.get("latents_std") is not None:
        raise UserError(
            f"model.vae: {part.place} has latents_mean and latents_std, as Playground 2.5 has; latents are only "
            "shifted and scaled here. Use a model without them"
        )
    return config


def load_autoencoder(part: Part, dtype: torch.dtype) -> nn.Module:
    """Load the autoencoder (AutoencoderKL or AutoencoderTiny) on the CPU.

    Raises:
        UserError: it is unsupported (``autoencoder_config``), or its weights do not match its configuration.
    """
    import diffusers

    config = autoencoder_config(part)
    name = config["_class_name"]
    from accelerate import init_empty_weights

    if part.file is None:
        kind = getattr(diffusers, name)
        with explain_load_errors(part):
            with init_empty_weights():
                expected = _shapes(kind.from_config(config).state_dict())
            _require_weights(part, expected)
            return kind.from_pretrained(part.folder, dtype=dtype, **_only_local(part))
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    original = {LDM_VAE + key: tensor for key, tensor in part.single_file().read("vae").items()}
    with init_empty_weights():
        vae = diffusers.AutoencoderKL.from_config(config)
    tensors = {key: tensor.to(dtype, copy=True) for key, tensor in convert_ldm_vae_checkpoint(original, config).items()}
    require_tensor_shapes(part, _shapes(vae.state_dict()), _shapes(tensors))
    vae.load_state_dict(tensors, assign=True)
    return vae


def use_tiles(vae: Any, pixels: int) -> None:
    """Process pictures larger than a tile of this side in tiles that overlap by a quarter (diffusers' tiling)."""
    from diffusers import AutoencoderTiny

    if isinstance(vae, AutoencoderTiny):  # whose tiled encoder assumes 4 latent channels, and SD3 has 16
        return
    vae.enable_tiling()
    vae.tile_sample_min_size = pixels
    vae.tile_latent_min_size = pixels // 2 ** (len(vae.config.block_out_channels) - 1)


def load_text_model(part: Part, dtype: torch.dtype, projected: bool = True) -> Any:
    """Load a CLIP text encoder, with its projection or without, on the CPU. (t5_layers.py loads T5 layer by layer.)

    Raises:
        UserError: the weights do not match the configuration.
    """
    from accelerate import init_empty_weights
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kind = CLIPTextModelWithProjection if projected else CLIPTextModel
    with explain_load_errors(part), init_empty_weights():
        config = CLIPTextConfig.from_dict(part.config())
        expected = _shapes(kind(config).state_dict())
    if part.file is None:
        with explain_load_errors(part):
            _require_weights(part, expected, "" if projected else "text_model.")
            model = kind.from_pretrained(part.folder, dtype=dtype, **_only_local(part))
    else:
        tensors = _clip_tensors(part)
        require_tensor_shapes(part, expected, _shapes(tensors))
        model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
        del tensors
    # Out of the memory-mapped file, one at a time, into aligned memory that torch allocates: a matrix-vector product
    # selects its kernel by the weight's alignment, so otherwise the last bits of an embedding would depend on the
    # weight's offset in the file.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _clip_tensors(part: Part) -> dict[str, Tensor]:
    """Read a CLIP encoder's tensors under transformers' names, in the types they have on disk."""
    import torch

    file = part.single_file()
    read = file.read(part.name)
    if file.layout.text is not None:
        return file.layout.text(read, part.config())
    unused = ("position_ids", "logit_scale")
    tensors = {key: tensor for key, tensor in read.items() if not key.endswith(unused)}
    # The original CLIP-L has no projection; diffusers and ComfyUI use the identity, too.
    if part.name == "text_encoder" and "text_projection.weight" not in tensors:
        width = tensors["text_model.embeddings.token_embedding.weight"].shape[1]
        tensors["text_projection.weight"] = torch.eye(width)
    return tensors


@contextmanager
def explain_load_errors(part: Part) -> Iterator[None]:
    """Turn exceptions raised while a part is built or read into a UserError: its files are damaged, or do not match."""
    from huggingface_hub.errors import StrictDataclassError

    odd = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
    try:
        yield
    except (*odd, StrictDataclassError) as error:
        said = str(error).strip().partition("\n")[0][:300]
        raise UserError(
            f"{part.place} cannot be loaded ({type(error).__name__}: {said}). Its files are damaged or do not match "
            "each other. Download it again"
        ) from error


def _only_local(part: Part) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` to read the safetensors of a part's folder."""
    assert part.folder is not None
    return {"local_files_only": True, "use_safetensors": True, "variant": variant_of(part.folder)}


def _require_weights(part: Part, expected: Mapping[str, torch.Size], prefix: str = "") -> None:
    """Compare the names and shapes in a folder's headers with its configuration's before allocating anything. Names may
    have the prefix in the file, but not in the model: transformers 5 no longer writes it. diffusers renames attention
    layers that its older versions wrote, as in the published autoencoders of SD 1.5 and 2."""
    assert part.folder is not None
    headers = [read_header(file) for file in weight_files(part.folder)]
    entries = [
        (OLD_ATTENTION.sub(lambda match: NEW_ATTENTION[match[1]], name.removeprefix(prefix)), entry)
        for header in headers
        for name, entry in header.items()
    ]
    found = {name: tuple(entry["shape"]) for name, entry in entries if name in expected}
    require_tensor_shapes(part, expected, found)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def require_tensor_shapes(part: Part, expected: Mapping[str, torch.Size], found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the names and shapes in the file with those in the configuration. UserError: they differ."""
    missing, odd = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    sized = [key for key in expected if key in found and found[key] != expected[key]]
    kinds = {"missing": missing, "unexpected": odd, "wrong shape": sized}
    listed = [f"{title}: {join_names(names)}" for title, names in kinds.items() if names]
    if listed:
        of_file = "Set model.text_encoders to a folder with the file's own configurations"
        remedy = of_file if part.file else "Download it again"
        raise UserError(
            f"{part.place} does not match its configuration ({part.folder or 'bundled'}). {'; '.join(listed)}. {remedy}"
        )


def groups_of(width: int) -> int:
    """The number of scales for a packed token of this width."""
    return width // GROUP if width % GROUP == 0 else 1
