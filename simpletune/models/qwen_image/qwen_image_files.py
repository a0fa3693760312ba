"""Qwen-Image's parts: single files, whose names are diffusers', the configuration that shapes imply, and which models
with similar names are not trained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from simpletune.models.shared.family_files import FamilyFiles, ModelOption
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parameter_shapes import shapes_of_class
from simpletune.models.shared.single_file import FileLayout, Origin
from simpletune.system.hub import is_hub_name
from simpletune.system.options import Problem, UserError

CLASS = "QwenImageTransformer2DModel"
BLOCKS = "transformer_blocks"
NEWEST, FIRST = "Qwen/Qwen-Image-2512", "Qwen/Qwen-Image"
HUB_NAMES: Mapping[str, str] = {NEWEST: "qwen_image", FIRST: "qwen_image"}
"""Version of each Hub name whose configurations ship; both have the same."""
REMEDY = f"Use {NEWEST}"
EDIT = f"Qwen-Image-Edit, which reads reference pictures. {REMEDY}"
LAYERED = f"Qwen-Image-Layered, which draws several layers of a picture. {REMEDY}"
CONTROL = f"a ControlNet of Qwen-Image, which steers a whole model. {REMEDY}"
LIGHTNING = f"Qwen-Image-Lightning, which draws in few steps and loses that by training. {REMEDY}"
NEXT = f"Qwen-Image-2.1, a smaller transformer of other layers, with an autoencoder of its own. {REMEDY}"
OTHER_NAMES = {
    r"(?i)qwen[-_. ]?image.*edit": EDIT,
    r"(?i)qwen[-_. ]?image.*layered": LAYERED,
    r"(?i)qwen[-_. ]?image.*control": CONTROL,
    r"(?i)qwen[-_. ]?image.*lightning": LIGHTNING,
    r"(?i)qwen[-_. ]?image[-_. ]?2\.1": NEXT,
}
"""What the models are that are not trained, by a pattern of their names."""
PIPELINES = {"Edit": EDIT, "Layered": LAYERED, "Control": CONTROL, "21": NEXT}
"""The same, by what follows ``QwenImage`` in the name of a pipeline's class."""
UNUSED = "pooled_projection_dim"
"""A setting of the published transformers that diffusers ignores, and says so."""
PATCH = 2  # places of a latent a side that one token reads


@lru_cache(maxsize=1)
def bundled_configs() -> Mapping[str, Mapping[str, ModelConfig]]:
    """Return the configurations by version and part."""
    return {"qwen_image": json.loads((Path(__file__).parent / "qwen_image_parts.json").read_bytes())}


def _infer(shapes: Mapping[str, list[int]]) -> ModelConfig:
    """Infer the transformer's configuration from its tensors' shapes."""
    width, patch = shapes["img_in.weight"]
    (head,) = shapes[f"{BLOCKS}.0.attn.norm_q.weight"]
    return {
        **bundled_configs()["qwen_image"]["transformer"],
        "in_channels": patch,
        "out_channels": shapes["proj_out.weight"][0] // PATCH**2,
        "num_layers": 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith(f"{BLOCKS}.")),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        # in the published model's proportions, 2 : 7 : 7, of even numbers
        "axes_dims_rope": [head - 2 * (side := head * 7 // 32 * 2), side, side],
    }


def require_qwen_image(config: ModelConfig) -> None:
    """Raise UserError if a transformer's configuration is that of another model with this class."""
    if config.get("zero_cond_t"):
        raise UserError(EDIT.replace("-Edit", "-Edit-2511"))
    if config.get("use_additional_t_cond") or config.get("use_layer3d_rope"):
        raise UserError(LAYERED)


def origins(config: ModelConfig) -> dict[str, Origin]:
    """Return the source of each of the transformer's tensors, which has the same name."""
    return {name: Origin(name) for name in shapes_of_class(CLASS, config)}


LAYOUT = FileLayout(
    family="Qwen-Image",
    denoiser="transformer",
    marker=f"{BLOCKS}.0.img_mod.1.weight",
    prefixes={},  # published files have the transformer alone
    infer=_infer,
    origins=origins,
    refused={
        r"(^|\.)time_text_embed\.addition_t_embedding\.": LAYERED,
        r"(^|\.)controlnet_(blocks|x_embedder)\.": CONTROL,
        r"(^|\.)txt_in\.text_norm\.": NEXT,
    },
)


class QwenImageOption(ModelOption):
    """The fields of Qwen-Image's option that its files read."""

    if TYPE_CHECKING:
        transformer: str | None


class QwenImageFiles(FamilyFiles):
    """Where the parts of Qwen-Image come from."""

    family: QwenImageOption

    layout: ClassVar[FileLayout | None] = LAYOUT
    hub_names: ClassVar[Mapping[str, str]] = HUB_NAMES
    unread: ClassVar[Mapping[str, int]] = {"text_encoder": 676_550_144 + 544_997_376}  # vision tower, lm_head

    bundled_configs: ClassVar = staticmethod(bundled_configs)

    def file_version(self) -> str:
        return "qwen_image"

    def require_supported(self, config: ModelConfig, place: str) -> None:
        try:
            require_qwen_image(config)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None

    def denoiser_config(self, fetch: bool = True) -> ModelConfig | None:
        config = super().denoiser_config(fetch)
        if config is None:
            return None
        self.require_supported(config, self.weights_from)
        return {key: value for key, value in config.items() if key != UNUSED}

    def fetch(self) -> None:
        if (other := self._by_pipeline()) is not None:
            raise UserError(f"{self.family.pretrained} is {other}")
        super().fetch()

    def problems(self) -> Iterator[Problem]:
        """Add models with similar names that are not trained."""
        field = "pretrained" if self.family.transformer is None else "transformer"
        name = re.split(r"[/\\]", self.weights_from.rstrip("/\\"))[-1]
        for pattern, what in OTHER_NAMES.items():
            if re.search(pattern, name):
                yield Problem(f"model.{field}", f"{self.weights_from} is, by its name, {what}")
                return
        here = field == "pretrained" and not is_hub_name(self.weights_from)
        if here and (other := self._by_pipeline()) is not None:
            yield Problem("model.pretrained", f"{self.weights_from} is {other}")
            return
        yield from super().problems()

    def _by_pipeline(self) -> str | None:
        """Say what a pipeline is by its class, if it is not trained: Edit's transformers have the same tensors."""
        name = str(self.pipeline_index().get("_class_name", "")).removeprefix("QwenImage")
        return next((what for start, what in PIPELINES.items() if name.startswith(start)), None)
