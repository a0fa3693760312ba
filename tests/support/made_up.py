"""A family that the package does not have: FLUX.2's transformer and autoencoder, tiny, and a Qwen3 as text encoder.

It differs from every family of the package: a language model with a chat template and two tapped layers, prompts of
their own lengths and no pooled one; latents of 16 x 16 pixels with a batch norm's statistics; modulations that all
blocks share; one linear layer for q, k, v and the mlp; and a network that predicts z_0 - noise from time 1 - sigma.
What stands here up to ``MadeUp`` is what such a family costs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from benchmarks.tiny_models import tiny_klein
from simpletune.models.objectives.conventions import FlowConventions, empirical_mu
from simpletune.models.shared.architecture import Architecture, AttentionShape
from simpletune.models.shared.autoencoder import Latents
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.family import Family
from simpletune.models.shared.family_files import LoraNames
from simpletune.models.shared.fused import Fused, Rows
from simpletune.models.shared.lora_layout import Layout
from simpletune.models.shared.lora_layout import LoraNames as Names
from simpletune.models.shared.modulation import Modulation
from simpletune.models.shared.words import DiffusersPipeline, Words
from simpletune.models.text.encoder import TextEncoder
from simpletune.models.text.family_text import FamilyText, TextRegion
from simpletune.models.text.qwen3 import Qwen3Encoder

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.models.shared.conditioning import Conditioning

TAPS = (1, 3)
FUSED = {
    **Fused("img_attn.qkv", ("attn.to_q", "attn.to_k", "attn.to_v")).rows(),
    **Fused("txt_attn.qkv", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")).rows(),
}
DOUBLE = {
    "attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj",
    "ff.linear_in": "img_mlp.0", "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0", "ff_context.linear_out": "txt_mlp.2",
}  # fmt: skip
SINGLE = {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}


class MadeUpText(FamilyText["MadeUp"]):
    """One Qwen3."""

    one_length: ClassVar[bool] = False
    masked: ClassVar[bool] = True

    @property
    def encoders(self) -> Sequence[TextEncoder]:
        return (Qwen3Encoder("qwen3", "tokenizer", "text_encoder", "Qwen3", self.family.text_length, taps=TAPS),)

    @property
    def tokens(self) -> int:
        return self.family.text_length

    @property
    def width(self) -> int:
        return int(self.family.files.known_config()["joint_attention_dim"])

    def regions(self) -> Mapping[str, TextRegion]:
        return {"qwen3": TextRegion("text_encoder", self.width)}

    def describe(self) -> str:
        return f"Qwen3 with at most {self.tokens} tokens"

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Conditioning:
        from simpletune.models.shared.conditioning import Conditioning

        return Conditioning(parts["qwen3"]["hidden"])


_DOUBLE, _SINGLE = r"^transformer_blocks\.\d+\.", r"^single_transformer_blocks\.\d+\."
_ATTENTION = rf"{_DOUBLE}attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)$|{_SINGLE}"
BLOCKS = {"transformer_blocks": ("double_blocks", DOUBLE), "single_transformer_blocks": ("single_blocks", SINGLE)}


class MadeUpNames(Names):
    """Names of its layers in LoRA files."""

    title = "Made-up"
    denoiser = "transformer"
    short = {"blocks": "transformer_blocks", "single": "single_transformer_blocks"}
    header = {"": {"modelspec.architecture": "made-up/lora"}}
    targets = {
        "attention": re.compile(_ATTENTION),
        "attention_mlp": re.compile(rf"{_ATTENTION}|{_DOUBLE}ff(_context)?\.linear_(in|out)$"),
        "all_linear": re.compile(rf"{_DOUBLE}|{_SINGLE}"),
    }

    def shows(self, name: str, inputs: int) -> int:
        return int(bool(re.search(r"single_|linear_(in|out)|_attn[._]|_mlp[._]", name)))

    def layers(self, module: str, layout: Layout) -> tuple[str, ...]:
        for ours, (theirs, leaves) in BLOCKS.items():
            known = leaves | ({name: own for name, (own, _) in FUSED.items()} if leaves is DOUBLE else {})
            name = layout.spelt(theirs if layout.original else ours)
            found = re.fullmatch(rf"{name}[._](\d+)[._](.+)", module)
            if found is not None:
                spelt = {ours: layout.spelt(own if layout.original else ours) for ours, own in known.items()}
                return tuple(f"{ours}.{found[1]}.{leaf}" for leaf, own in spelt.items() if own == found[2])
        return ()

    def original(self, layer: str) -> tuple[str, Rows | None]:
        start, number, inner = layer.split(".", 2)
        block, leaves = BLOCKS[start]
        fused, rows = FUSED[inner] if leaves is DOUBLE and inner in FUSED else (leaves[inner], None)
        return f"{block}.{number}.{fused}", rows


NAMES = MadeUpNames()
LAYOUTS = (
    Layout("diffusers", "transformer.", NAMES),
    Layout("comfy", "diffusion_model.", NAMES, original=True, alpha=True),
    Layout("bare", "", NAMES),
)


class MadeUpArchitecture(Architecture):
    """FLUX.2's transformer."""

    diffusers_class: ClassVar[str] = "Flux2Transformer2DModel"
    multiple: ClassVar[int] = 16
    largest_side: ClassVar[int] = 2048
    after_units: ClassVar[str] = "norm_out"
    starts_small: ClassVar[str] = r"modulation|norm_out\.linear|^proj_out\."
    modulation: ClassVar[Modulation | None] = Modulation(
        embed="time_guidance_embed",
        layers={r"_modulation(_img|_txt)?\.linear$": "act_fn", r"^norm_out\.linear$": "silu"},
        inputs=lambda time, pooled, dtype: (time.to(dtype) * 1000, None),
        reads_pooled=False,
    )

    def units_among(self, names: Collection[str]) -> tuple[str, ...]:
        blocks = (name.split(".") for name in names if name.split(".")[0] in BLOCKS)
        return tuple(dict.fromkeys(f"{block}.{number}" for block, number, *_ in blocks))

    def image_tokens(self, size: Size) -> int:
        return size[0] // 16 * (size[1] // 16)

    def layer_rows(self, size: Size) -> Callable[[str], int]:
        image, text = self.image_tokens(size), self.family.text.tokens

        def rows(layer: str) -> int:
            if layer.startswith("single_"):
                return image + text
            return text if re.search(r"\.(add_|to_add_out|ff_context)", layer) else image

        return rows

    def attentions(self, size: Size) -> Sequence[AttentionShape]:
        config, tokens = self.family.files.known_config(), self.image_tokens(size) + self.family.text.tokens
        return [AttentionShape(config["num_attention_heads"], tokens, tokens, config["attention_head_dim"])]


class MadeUp(Family):
    """The family."""

    family: Literal["made_up"] = "made_up"
    """A family of tests."""
    pretrained: Annotated[str, Field(min_length=1)] = "nobody/made-up"
    """A folder in diffusers' layout."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Start from the pretrained transformer, or from random weights."""
    loras: LoraNames = []
    """LoRAs to train on top of."""
    transformer: str | None = None
    """Replaces the transformer."""
    vae: str | None = None
    """Replaces the autoencoder."""
    text_encoders: str | None = None
    """Folder of a pipeline with tokenizer and text encoder."""
    text_length: Annotated[int, Field(ge=16, le=512)] = 96
    """The most tokens of a prompt."""

    denoiser: ClassVar[str] = "transformer"
    architecture_class: ClassVar[type[Architecture]] = MadeUpArchitecture
    text_class: ClassVar[type[FamilyText[Any]]] = MadeUpText
    latents: ClassVar[Latents] = Latents(("AutoencoderKLFlux2",), 16)
    lora: ClassVar[Sequence[Layout]] = LAYOUTS
    objectives: ClassVar[tuple[str, ...]] = ("flow",)
    flow: ClassVar[FlowConventions] = FlowConventions(1.0, 0.0, -1, empirical_mu, from_one=True)
    words: ClassVar[Words] = Words(
        title="Made-up",
        pipeline=DiffusersPipeline("Flux2KleinPipeline", "made-up", negative_prompt=False),
        resolution=512,
        guidance=4.0,
        no_hypernetwork="its attention reads prompt and picture together. Use adapter.method lora",
    )

    def predict(
        self, model: nn.Module, z_t: Tensor, time: Tensor, conditioning: Conditioning, dtype: torch.dtype
    ) -> Tensor:
        import torch

        b, c, h, w = z_t.shape
        embeds, mask = conditioning.embeds.to(dtype), conditioning.mask

        def places(rows: int, columns: int, tokens: int) -> Tensor:
            return torch.cartesian_prod(*(torch.arange(n, device=z_t.device) for n in (1, rows, columns, tokens)))

        seen = None if mask is None else torch.cat([mask, mask.new_ones(b, h * w)], 1)[:, None, None]
        predicted = model(
            hidden_states=z_t.to(dtype).flatten(2).transpose(1, 2),
            encoder_hidden_states=embeds,
            timestep=time,
            img_ids=places(h, w, 1),
            txt_ids=places(1, 1, embeds.shape[1]),
            joint_attention_kwargs=None if seen is None else {"attention_mask": seen},
            return_dict=False,
        )[0]
        return predicted.transpose(1, 2).reshape(b, c, h, w)


def build(folder: Path) -> Path:
    """Write a pipeline of random weights in diffusers' layout."""
    return tiny_klein.build(folder, text={"num_hidden_layers": 4}, joint_attention_dim=64)


@contextmanager
def registered() -> Iterator[None]:
    """Put the family in klein's place, whose class and layers it has, in the union and what is computed from it; in a
    release it would stand in families.py."""
    import simpletune.adapters.files.header  # noqa: F401  they keep what is changed here from their import on
    import simpletune.adapters.files.starting_point  # noqa: F401
    import simpletune.adapters.files.updates  # noqa: F401
    import simpletune.adapters.methods.targets  # noqa: F401
    from simpletune.config.schema import TrainConfig
    from simpletune.models import families, lora_registry

    field, usual = TrainConfig.model_fields["model"], families.FAMILIES
    union = Annotated[get_args(families.Model)[0] | MadeUp, Field(discriminator="family")]
    changed = FieldInfo.from_annotated_attribute(union, field.default)
    changed.description = field.description
    layouts = cast(dict[Names, Sequence[Layout]], lora_registry.LAYOUTS)
    own = dict(layouts)
    klein = next(each for each in usual if each.family == "klein").lora[0].names
    new = {
        "FAMILIES": (usual, tuple(MadeUp() if each.family == "klein" else each for each in usual)),
        "TARGETS": (lora_registry.TARGETS, tuple(dict.fromkeys((*lora_registry.TARGETS, *NAMES.targets)))),
        "SHORT": (lora_registry.SHORT, sorted({*lora_registry.SHORT, *NAMES.short.items()})),
    }
    exchange = partial(_exchange, new)
    try:
        _fill(layouts, dict((NAMES, LAYOUTS) if names is klein else (names, each) for names, each in own.items()))
        exchange(0, 1)
        _set_model(TrainConfig, changed)
        yield
    finally:
        _set_model(TrainConfig, field)
        exchange(1, 0)
        _fill(layouts, own)


def _fill(layouts: dict[Names, Sequence[Layout]], own: Mapping[Names, Sequence[Layout]]) -> None:
    layouts.clear()  # so that the order, which decides between families that share names, is that of ``own``
    layouts.update(own)


def _exchange(values: Mapping[str, tuple[object, object]], old: int, new: int) -> None:
    for name, pair in values.items():
        for module in [each for key, each in sys.modules.items() if key.startswith("simpletune.")]:
            if vars(module).get(name) is pair[old]:
                setattr(module, name, pair[new])
    from simpletune.models import lora_registry

    lora_registry.matches_layer.cache_clear()
    lora_registry.is_convolution.cache_clear()


def _set_model(config: type[BaseModel], field: FieldInfo) -> None:
    config.__pydantic_fields__["model"] = field
    config.model_rebuild(force=True)
