"""Single ``.safetensors`` files in the original layout (Stability, ComfyUI): identify their content by the header.

Imports torch only to read tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.models.config_limits import require_sizes
from simpletune.models.original_names import origin_of
from simpletune.models.sd3_shapes import ModelConfig, parameter_shapes
from simpletune.options import UserError, shortened
from simpletune.system.checksums import fingerprint_of_range
from simpletune.system.safetensors_file import read_header

if TYPE_CHECKING:
    from torch import Tensor

PREFIXES = {
    "vae": "first_stage_model.",
    "text_encoder": "text_encoders.clip_l.transformer.",
    "text_encoder_2": "text_encoders.clip_g.transformer.",
    "text_encoder_3": "text_encoders.t5xxl.transformer.",
}
TRANSFORMER_PREFIXES = ("model.diffusion_model.", "")
FIRST_BLOCK = "joint_blocks.0.x_block.attn.qkv.weight"
HEAD_WIDTH = 64  # of SD3 models without a qk norm; the length of the norm gives it otherwise

# Kinds of files by the names of their tensors, most specific first.
FOREIGN = (
    (r"\.lora_(A|B|up|down)\b|^lora_unet_|^lora_te", "a LoRA: pass it to inference/lora_inference.py as --lora"),
    (r"^(model\.diffusion_model\.)?double_blocks\.\d+\.img_attn", "Flux"),
    (r"^conditioner\.embedders\.|diffusion_model\.label_emb\.", "Stable Diffusion XL"),
    (r"^cond_stage_model\.model\.", "Stable Diffusion 2"),
    (r"^cond_stage_model\.transformer\.|diffusion_model\.input_blocks\.", "Stable Diffusion 1.5"),
    (r"^double_layers\.\d+\.attn", "AuraFlow"),
    (
        r"^transformer_blocks\.\d+\.attn\.add_q_proj",
        "SD3's transformer in diffusers' layout: give the folder that contains it",
    ),
    (r"^(encoder|decoder)\.(conv_in|down|up|mid)", "an autoencoder alone"),
    (r"^text_model\.|^encoder\.block\.\d+\.layer", "a text encoder alone"),
)


class SingleFile:
    """A file in the original layout, of which only the header is read. Create it with ``open_file``.

    Args:
        path: the file.

    Raises:
        UserError: it is damaged, or contains no SD3 model.
    """

    def __init__(self, path: Path):
        if path.suffix != ".safetensors":
            raise UserError(
                f"{path} is not a .safetensors file. Pickled checkpoints (.ckpt, .pt) are not supported: convert it"
            )
        self.path = path
        self.header = {name: entry for name, entry in read_header(path).items() if name != "__metadata__"}
        self.prefix = next((prefix for prefix in TRANSFORMER_PREFIXES if prefix + FIRST_BLOCK in self.header), "")
        if not self.has("transformer") and not any(self.has(part) for part in PREFIXES if part != "vae"):
            seems = f"It seems to be {kind}" if (kind := self._kind()) else f"Its first tensors: {self._first_names()}"
            raise UserError(f"{path} contains no SD3 model in the original layout (joint_blocks...). {seems}")

    def _kind(self) -> str | None:
        found = (kind for pattern, kind in FOREIGN if any(re.search(pattern, name) for name in self.header))
        return next(found, None)

    def _first_names(self) -> str:
        return ", ".join(list(self.header)[:3]) or "nothing"

    def has(self, part: str) -> bool:
        """Whether the file contains the weights of a part (``transformer``, ``vae``, ``text_encoder``, ...)."""
        if part == "transformer":
            return self.prefix + FIRST_BLOCK in self.header
        return part in PREFIXES and any(name.startswith(PREFIXES[part]) for name in self.header)

    def tensors_of(self, part: str) -> ModelConfig:
        """Header entries of a part, by the name without its prefix.

        Raises:
            UserError: they have an unsupported type.
        """
        prefix = self.prefix if part == "transformer" else PREFIXES[part]
        others = () if prefix else tuple(PREFIXES.values())
        named = {name: entry for name, entry in self.header.items() if name.startswith(prefix)}
        found = {name.removeprefix(prefix): entry for name, entry in named.items() if not name.startswith(others)}
        types = sorted(
            {entry["dtype"] for entry in found.values()} - {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64"}
        )
        scaled = [name for name in found if name.endswith(("scaled_fp8", ".scale_weight", ".weight_scale"))]
        if scaled or types:
            what = f"scaled fp8 ({scaled[0]})" if scaled else f"the type {', '.join(types)}"
            raise UserError(
                f"{self.path}: its {part} is in {what}, which is not supported. Use the fp16 or bf16 file instead"
            )
        return found

    @cached_property
    def transformer_config(self) -> ModelConfig:
        """The transformer's configuration, inferred from its tensors' shapes.

        Raises:
            UserError: tensors are missing or have impossible shapes.
        """
        found = self.tensors_of("transformer")
        try:
            config = _infer({name: entry["shape"] for name, entry in found.items()})
        except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
            raise UserError(f"{self._incomplete()}: {error} is missing or invalid. Download it again") from None
        require_sizes(config, "transformer", str(self.path))
        layers = config["num_layers"]
        wanted = {origin_of(name, layers).name for name in (*parameter_shapes(config), "pos_embed.pos_embed")}
        if missing := sorted(wanted - set(found)):
            raise UserError(f"{self._incomplete()}; missing: {shortened(missing)}. Download it again")
        return config

    def _incomplete(self) -> str:
        return f"{self.path} is not a complete SD3 transformer"

    def check(self, part: str) -> None:
        """Check that a part can be read.

        Raises:
            UserError: tensors are missing, or have an unsupported type.
        """
        _ = self.transformer_config if part == "transformer" else self.tensors_of(part)

    def fingerprint(self, part: str) -> str:
        """A short hash of a part's names, types and shapes, and of samples spread over its bytes."""
        entries = self.tensors_of(part)
        about = repr(sorted((name, entry["dtype"], entry["shape"]) for name, entry in entries.items()))
        with open(self.path, "rb") as handle:
            start = 8 + int.from_bytes(handle.read(8), "little")
        offsets = [entry["data_offsets"] for entry in entries.values()]
        first, last = min(begin for begin, _ in offsets), max(end for _, end in offsets)
        return fingerprint_of_range(self.path, about, start + first, start + last)

    def read(self, part: str) -> dict[str, Tensor]:
        """Read a part's tensors, by the name without its prefix, as views of the memory-mapped file."""
        from safetensors import safe_open

        prefix = PREFIXES[part]
        with safe_open(self.path, framework="pt") as handle:
            return {name: handle.get_tensor(prefix + name) for name in self.tensors_of(part)}


def open_file(path: Path) -> SingleFile:
    """Open a file by its header, cached until the file changes.

    Raises:
        UserError: it is damaged, or contains no SD3 model.
    """
    return _open(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _open(path: Path, _changed: int) -> SingleFile:
    return SingleFile(path)


def _infer(shapes: Mapping[str, list[int]]) -> ModelConfig:
    """Infer the transformer's configuration from its tensors' shapes, by original names."""
    hidden, channels, patch, _ = shapes["x_embedder.proj.weight"]
    numbers = [int(name.split(".")[1]) for name in shapes if name.startswith("joint_blocks.")]
    qk_norm = shapes.get("joint_blocks.0.x_block.attn.ln_q.weight")
    head = qk_norm[0] if qk_norm else HEAD_WIDTH
    caption, text = shapes["context_embedder.weight"]
    dual = sorted({int(name.split(".")[1]) for name in shapes if ".x_block.attn2.qkv.weight" in name})
    return {
        "_class_name": "SD3Transformer2DModel",
        "sample_size": 128,
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // patch**2,
        "num_layers": max(numbers) + 1,
        "num_attention_heads": hidden // head,
        "attention_head_dim": head,
        "joint_attention_dim": text,
        "caption_projection_dim": caption,
        "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
        "pos_embed_max_size": math.isqrt(shapes["pos_embed"][1]),
        "dual_attention_layers": dual,
        "qk_norm": "rms_norm" if qk_norm else None,
    }


class OriginalReader:
    """Reads the transformer of a memory-mapped single file on demand, under diffusers' names.

    Args:
        path: the file.
    """

    def __init__(self, path: Path):
        from safetensors import safe_open

        file = open_file(path)
        self._prefix = file.prefix
        layers = file.transformer_config["num_layers"]
        targets = (*parameter_shapes(file.transformer_config), "pos_embed.pos_embed")
        self._origins = {name: origin_of(name, layers) for name in targets}
        self._unknown = set(file.tensors_of("transformer")) - {origin.name for origin in self._origins.values()}
        self._file = safe_open(path, framework="pt")

    @property
    def names(self) -> set[str]:
        """The names of all tensors: diffusers' names, or the original names of unknown tensors."""
        return set(self._origins) | self._unknown

    def get(self, name: str) -> Tensor:
        """Read one tensor on the CPU in its type on disk, except that fp8 is converted to bf16, which is exact."""
        import torch

        origin = self._origins[name]
        tensor = self._file.get_tensor(self._prefix + origin.name)
        if origin.third is not None:
            tensor = tensor.chunk(3)[origin.third]
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            tensor = tensor.to(torch.bfloat16)
        return torch.cat(tensor.chunk(2)[::-1]) if origin.swapped else tensor
