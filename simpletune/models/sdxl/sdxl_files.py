"""The single files of Stable Diffusion XL (Stability, ComfyUI, sd-scripts): CLIP-L has transformers' names, CLIP-G
OpenCLIP's.

Marks, as ComfyUI reads and writes them (comfy/supported_models.py, ``SDXL.model_type``;
comfy_extras/nodes_model_merging.py, ``save_checkpoint``); sd-scripts and OneTrainer ask the user instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.sdxl.sdxl_config import (
    HUB_NAMES,
    REMEDY,
    V_PREDICTION,
    ZERO_SNR,
    bundled_configs,
    require_supported,
)
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.single_file import FileLayout, Origin
from simpletune.models.unet.unet_family import UNetFiles
from simpletune.models.unet.unet_files import (
    OPEN_CLIP,
    inferred,
    open_clip_origin,
    open_clip_tensors,
    origins,
    vae_origins,
)

if TYPE_CHECKING:
    from torch import Tensor


def _infer(shapes: Mapping[str, list[int]]) -> ModelConfig:
    """Infer the UNet's configuration from its tensors' shapes, by original names."""
    added = shapes["label_emb.0.0.weight"][1]
    return {**inferred(shapes, bundled_configs()["sdxl"]["unet"]), "projection_class_embeddings_input_dim": added}


def origins_beside(part: str, names: Collection[str], config: ModelConfig) -> dict[str, Origin]:
    """See ``FileLayout.others``."""
    if part == "vae":
        return vae_origins(names)
    own = {name: name.removeprefix("text_model.") for name in names}
    if part == "text_encoder":
        return {name: Origin(f"text_model.{inner}") for name, inner in own.items()}
    return {name: open_clip_origin(inner) for name, inner in own.items() if inner != "embeddings.position_ids"}


def text_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """See ``FileLayout.text``. Leaves out what the UNet does not read."""
    if any(name.startswith(OPEN_CLIP) for name in tensors):
        found = open_clip_tensors(tensors, config["hidden_size"])
        unused: tuple[str, ...] = ("position_ids", "logit_scale")
    else:
        found = {name.removeprefix("text_model."): tensor for name, tensor in tensors.items()}
        unused = ("position_ids", "logit_scale", "text_projection.weight")
    return {name: tensor for name, tensor in found.items() if not name.endswith(unused)}


LAYOUT = FileLayout(
    family="SDXL",
    denoiser="unet",
    marker="label_emb.0.0.weight",
    prefixes={
        "vae": "first_stage_model.",
        "text_encoder": "conditioner.embedders.0.transformer.",
        "text_encoder_2": "conditioner.embedders.1.",
    },
    infer=_infer,
    origins=origins,
    text=text_tensors,
    others=origins_beside,
    marks={"v_pred": V_PREDICTION, "ztsnr": ZERO_SNR},
    refused={
        r"^edm_(mean|std)$": f"Playground 2.5, whose noise (EDM) is another one. {REMEDY}",
        r"^edm_vpred\.": f"CosXL, whose noise (EDM) is another one. {REMEDY}",
        r"^conditioner\.embedders\.0\.model\.": f"a refiner of Stable Diffusion XL, which cannot be trained. {REMEDY}",
    },
)


class SDXLFiles(UNetFiles):
    """Where the parts of Stable Diffusion XL come from."""

    layout: ClassVar[FileLayout | None] = LAYOUT
    hub_names: ClassVar[Mapping[str, str]] = HUB_NAMES

    bundled_configs: ClassVar = staticmethod(bundled_configs)
    require_supported: ClassVar = staticmethod(require_supported)

    def file_version(self) -> str:
        return "sdxl"
