"""Z-Image's parts: the original names of its transformer's tensors (Tongyi, ComfyUI), the configuration that their
shapes imply, and which models with similar names are not trained.

The original layout stacks q, k and v in one tensor.
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
from simpletune.system.options import Problem, UserError

CLASS = "ZImageTransformer2DModel"
BASE = "Tongyi-MAI/Z-Image"
TURBO = "Tongyi-MAI/Z-Image-Turbo"
HUB_NAMES: Mapping[str, str] = {BASE: "base", TURBO: "turbo"}
"""Version of each Hub name whose configurations ship; they differ in the shift of the scheduler."""
SHIFT, TURBO_SHIFT = 6.0, 3.0  # of the schedulers of base and Turbo
IS_TURBO = r"(?i)(?<!de)(?<!de[-_. ])turbo"
"""Occurs in the names of Turbo's files, whose tensors are those of the base, and of no de-distilled model's."""
REMEDY = f"Use {BASE}"
OMNI = f"Z-Image-Omni, which reads reference pictures. {REMEDY}"
CONTROL = f"a ControlNet of Z-Image, which steers a whole model. {REMEDY}"
LUMINA_2 = f"Lumina 2, whose transformer has layers of the same names. {REMEDY}"
OTHER_NAMES = {
    r"(?i)z[-_. ]?image[-_. ]?omni": OMNI,
    r"(?i)z[-_. ]?image[-_. ]?edit": f"Z-Image-Edit, which reads reference pictures. {REMEDY}",
    r"(?i)z[-_. ]?image.*control": CONTROL,
    r"(?i)lumina": LUMINA_2,
}
"""What the models are that are not trained, by a pattern of their names."""
WIDTH = 3840  # of the published model

MULTIPLE = 32  # tokens of picture and text are padded to a multiple of this
PATCH = 2  # places of a latent a side that one token reads
KIND = "2-1"  # names the layers for patches of this side, of one frame

BLOCKS = ("noise_refiner", "context_refiner", "layers")
FUSED = Fused("attention.qkv", ("attention.to_q", "attention.to_k", "attention.to_v")).rows()
IN_BLOCK = {
    "attention.to_out.0": "attention.out",
    "attention.norm_q": "attention.q_norm",
    "attention.norm_k": "attention.k_norm",
}
"""The original names of what a block has under another one in diffusers."""
OUTER = {
    f"all_x_embedder.{KIND}": "x_embedder",
    f"all_final_layer.{KIND}.linear": "final_layer.linear",
    f"all_final_layer.{KIND}.adaLN_modulation.1": "final_layer.adaLN_modulation.1",
}
UNUSED = "norm_final.weight"
"""A tensor of some files that no forward pass reads, and that diffusers drops, too."""


def padded(tokens: int) -> int:
    """Return a number of tokens with the learned padding after them."""
    return tokens + -tokens % MULTIPLE


@lru_cache(maxsize=1)
def bundled_configs() -> Mapping[str, Mapping[str, ModelConfig]]:
    """Return the configurations by version and part."""
    base = json.loads((Path(__file__).parent / "zimage_parts.json").read_bytes())
    return {"base": base, "turbo": {**base, "scheduler": {**base["scheduler"], "shift": TURBO_SHIFT}}}


def _infer(shapes: Mapping[str, list[int]]) -> ModelConfig:
    """Infer the transformer's configuration from its tensors' shapes, by original names."""
    width, patch = shapes["x_embedder.weight"]
    (head,) = shapes["layers.0.attention.q_norm.weight"]
    numbers = {
        kind: [int(name.split(".")[1]) for name in shapes if name.startswith(f"{kind}.")]
        for kind in ("layers", "noise_refiner")
    }
    usual = bundled_configs()["base"]["transformer"]
    return {
        **usual,
        "in_channels": patch // PATCH**2,
        "dim": width,
        "n_layers": max(numbers["layers"]) + 1,
        "n_refiner_layers": max(numbers["noise_refiner"]) + 1,
        "n_heads": width // head,
        "n_kv_heads": width // head,
        "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
        # in the published model's proportions, 2 : 3 : 3
        "axes_dims": [head // 4, head * 3 // 8, head * 3 // 8],
    }


def require_z_image(config: ModelConfig) -> None:
    """Raise UserError if a transformer's configuration is that of another model with this class."""
    if config.get("siglip_feat_dim") is not None:
        raise UserError(OMNI)


def origin_of(name: str) -> Origin:
    """Return the source of diffusers' tensor ``name``. Raises KeyError if there is none."""
    layer, _, leaf = name.rpartition(".")
    if layer in OUTER:
        return Origin(f"{OUTER[layer]}.{leaf}")
    start, _, rest = layer.partition(".")
    if start not in BLOCKS:
        return Origin(name)
    number, _, inner = rest.partition(".")
    own, rows = FUSED.get(inner, (IN_BLOCK.get(inner, inner), None))
    return Origin(f"{start}.{number}.{own}.{leaf}", rows)


def origins(config: ModelConfig) -> dict[str, Origin]:
    """Return the source of each of the transformer's tensors, by diffusers' name."""
    return {name: origin_of(name) for name in shapes_of_class(CLASS, config)}


LAYOUT = FileLayout(
    family="Z-Image",
    denoiser="transformer",
    marker="layers.0.attention.qkv.weight",
    prefixes={},  # published files have the transformer alone
    infer=_infer,
    origins=origins,
    unused=(UNUSED,),
    refused={
        r"(^|\.)control_(layers|all_x_embedder|noise_refiner)\.": CONTROL,
        r"(^|\.)siglip_(embedder|refiner|pad_token)": OMNI,
        r"(^|\.)layers\.0\.adaLN_modulation\.1\.": LUMINA_2,
    },
)


class ZImageOption(ModelOption):
    """The fields of Z-Image's option that its files read."""

    if TYPE_CHECKING:
        transformer: str | None


class ZImageFiles(FamilyFiles):
    """Where the parts of Z-Image come from."""

    family: ZImageOption

    layout: ClassVar[FileLayout | None] = LAYOUT
    hub_names: ClassVar[Mapping[str, str]] = HUB_NAMES

    bundled_configs: ClassVar = staticmethod(bundled_configs)

    def file_version(self) -> str:
        return "base" if self.family.few_steps is None else "turbo"

    def require_supported(self, config: ModelConfig, place: str) -> None:
        try:
            require_z_image(config)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None

    def denoiser_config(self, fetch: bool = True) -> ModelConfig | None:
        config = super().denoiser_config(fetch)
        if config is not None:
            self.require_supported(config, self.weights_from)
        return config

    def problems(self) -> Iterator[Problem]:
        """Add models with similar names that are not trained."""
        field = "pretrained" if self.family.transformer is None else "transformer"
        name = re.split(r"[/\\]", self.weights_from.rstrip("/\\"))[-1]
        for pattern, what in OTHER_NAMES.items():
            if re.search(pattern, name):
                yield Problem(f"model.{field}", f"{self.weights_from} is, by its name, {what}")
                return
        yield from super().problems()
