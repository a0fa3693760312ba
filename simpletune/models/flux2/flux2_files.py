"""FLUX.2 klein 4B's parts: the original names of its transformer's tensors (Black Forest Labs, ComfyUI), the
configuration that their shapes imply, and which of the models with these names are trained.

The original layout stacks q, k and v of a stream in one tensor, and stores shift before scale in ``norm_out``, where
diffusers has scale before shift. The linear layers of the parallel blocks, q, k, v and the mlp's, are one in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.shared.family_files import FamilyFiles, ModelOption
from simpletune.models.shared.fused import Fused
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parameter_shapes import shapes_of_class
from simpletune.models.shared.single_file import FileLayout, Origin
from simpletune.system.hub import is_hub_name
from simpletune.system.options import Problem, UserError

CLASS = "Flux2Transformer2DModel"
KLEIN = "black-forest-labs/FLUX.2-klein-base-4B"
DISTILLED = "black-forest-labs/FLUX.2-klein-4B"
HUB_NAMES: Mapping[str, str] = {KLEIN: "klein", DISTILLED: "klein"}
"""Version of each Hub name whose configurations ship with this package; both models have the same."""
TEXT_9B, TEXT_DEV = 12288, 15360  # widths of the text that klein 9B and dev read
REMEDY = f"Use {KLEIN}"
OTHERS = {
    TEXT_9B: f"FLUX.2 klein 9B, whose licence is non-commercial. {REMEDY}",
    TEXT_DEV: f"FLUX.2 dev, with 32 billion parameters and a non-commercial licence. {REMEDY}",
}
OTHER_NAMES = {TEXT_9B: r"(?i)klein[-_. ]?(base[-_. ]?)?9b", TEXT_DEV: r"(?i)flux[-_. ]?2[-_. ]?dev"}
"""Names, by the width of the text, under which the models are published that are not trained here."""
IS_DISTILLED = r"(?i)flux[-_. ]?2[-_. ]klein[-_. ]?4b"
"""Occurs in the names of the distilled model's files, whose tensors are those of the base."""
QUANTISED = r"(?i)fp8|nvfp4|gguf"
"""Occurs in names on the Hub of weights that are not read; a file here tells by its tensors."""
WHY_NOT_DISTILLED = (
    "the distilled FLUX.2 klein, which draws in 4 steps and without guidance, and loses that by training. Use "
    f"{KLEIN}, whose LoRAs it reads, or insist by model.distilled=true"
)

OUTER = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
JOINT = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
FUSED = {
    **Fused("img_attn.qkv", ("attn.to_q", "attn.to_k", "attn.to_v")).rows(),
    **Fused("txt_attn.qkv", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")).rows(),
}
PARALLEL = {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}
BLOCKS = {"transformer_blocks": ("double_blocks", JOINT), "single_transformer_blocks": ("single_blocks", PARALLEL)}
"""The original name of each kind of block, and those of its linear layers that are not a part of another."""
NORMS = {
    "transformer_blocks": {
        "attn.norm_q": "img_attn.norm.query_norm",
        "attn.norm_k": "img_attn.norm.key_norm",
        "attn.norm_added_q": "txt_attn.norm.query_norm",
        "attn.norm_added_k": "txt_attn.norm.key_norm",
    },
    "single_transformer_blocks": {"attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"},
}


@lru_cache(maxsize=1)
def bundled_configs() -> Mapping[str, Mapping[str, ModelConfig]]:
    """Return the configurations by version and part."""
    return {"klein": json.loads((Path(__file__).parent / "klein_parts.json").read_bytes())}


def _infer(shapes: Mapping[str, list[int]]) -> ModelConfig:
    """Infer the transformer's configuration from its tensors' shapes, by original names."""
    hidden, channels = shapes["img_in.weight"]
    (head,) = shapes["single_blocks.0.norm.query_norm.scale"]
    numbers = {
        kind: [int(name.split(".")[1]) for name in shapes if name.startswith(f"{kind}.")]
        for kind in ("double_blocks", "single_blocks")
    }
    config = {
        **bundled_configs()["klein"]["transformer"],
        "in_channels": channels,
        "num_layers": max(numbers["double_blocks"]) + 1,
        "num_single_layers": max(numbers["single_blocks"]) + 1,
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "timestep_guidance_channels": shapes["time_in.in_layer.weight"][1],
        "mlp_ratio": shapes["double_blocks.0.img_mlp.2.weight"][1] / hidden,
        "axes_dims_rope": [head // 4] * 4,
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
    }
    require_klein(config)
    return config


def require_klein(config: ModelConfig) -> None:
    """Raise UserError if a transformer's configuration is that of another model of FLUX.2."""
    width = config.get("joint_attention_dim", TEXT_DEV)  # diffusers' defaults are dev's
    if config.get("guidance_embeds", True) or width in OTHERS:
        raise UserError(OTHERS.get(width, OTHERS[TEXT_DEV]))


def origin_of(name: str) -> Origin:
    """Return the source of diffusers' tensor ``name``. Raises KeyError if there is none."""
    layer, _, leaf = name.rpartition(".")
    if layer in OUTER:
        return Origin(f"{OUTER[layer]}.{leaf}", swapped=layer == "norm_out.linear")
    start, number, inner = layer.split(".", 2)
    block, leaves = BLOCKS[start]
    if inner in NORMS[start]:
        return Origin(f"{block}.{number}.{NORMS[start][inner]}.scale")
    own, rows = FUSED[inner] if leaves is JOINT and inner in FUSED else (leaves[inner], None)
    return Origin(f"{block}.{number}.{own}.{leaf}", rows)


def origins(config: ModelConfig) -> dict[str, Origin]:
    """Return the source of each of the transformer's tensors, by diffusers' name."""
    return {name: origin_of(name) for name in shapes_of_class(CLASS, config)}


LAYOUT = FileLayout(
    family="FLUX.2 klein",
    denoiser="transformer",
    marker="single_stream_modulation.lin.weight",
    prefixes={},  # published files have the transformer alone
    infer=_infer,
    origins=origins,
)


class KleinOption(ModelOption):
    """The fields of klein's option that its files read."""

    if TYPE_CHECKING:
        transformer: str | None
        distilled: bool


class KleinFiles(FamilyFiles):
    """Where the parts of FLUX.2 klein 4B come from."""

    family: KleinOption

    layout: ClassVar[FileLayout | None] = LAYOUT
    hub_names: ClassVar[Mapping[str, str]] = HUB_NAMES

    bundled_configs: ClassVar = staticmethod(bundled_configs)

    def file_version(self) -> str:
        return "klein"

    def require_supported(self, config: ModelConfig, place: str) -> None:
        try:
            require_klein(config)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None

    def denoiser_config(self, fetch: bool = True) -> ModelConfig | None:
        config = super().denoiser_config(fetch)
        if config is not None:
            self.require_supported(config, self.weights_from)
        return config

    def fetch(self) -> None:
        if not self.family.distilled and self.pipeline_index().get("is_distilled"):
            raise UserError(f"{self.family.pretrained} is {WHY_NOT_DISTILLED}")
        super().fetch()

    def problems(self) -> Iterator[Problem]:
        """Add models of FLUX.2 that are not trained, as far as names and files here tell."""
        found = list(self._other_models())
        yield from found or super().problems()

    def _other_models(self) -> Iterator[Problem]:
        field = "pretrained" if self.family.transformer is None else "transformer"
        name = re.split(r"[/\\]", self.weights_from.rstrip("/\\"))[-1]
        for width, pattern in OTHER_NAMES.items():
            if re.search(pattern, name):
                yield Problem(f"model.{field}", f"{self.weights_from} is, by its name, {OTHERS[width]}")
                return
        on_hub = is_hub_name(self.weights_from)
        if on_hub and (found := re.search(QUANTISED, name)) is not None:
            message = f"{self.weights_from} is, by its name, in {found[0]}. Weights in fp8, nvfp4 or GGUF are not read."
            yield Problem(f"model.{field}", f"{message} {REMEDY}")
            return
        if self.family.distilled:
            return
        index = {} if on_hub or field != "pretrained" else self.pipeline_index()
        if index.get("is_distilled") or re.search(IS_DISTILLED, name):
            yield Problem(f"model.{field}", f"{self.weights_from} is {WHY_NOT_DISTILLED}")
