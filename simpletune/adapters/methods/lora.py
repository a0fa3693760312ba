"""LoRA: low-rank updates of frozen linear layers and convolutions (arXiv:2106.09685), with PEFT."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.methods.adapter import OUTPUT, Shapes
from simpletune.adapters.methods.targets import RankedLayers, StartName, TargetedMethod, Targets, spread
from simpletune.models.lora_registry import is_convolution, result_layout
from simpletune.system.options import Problem

if TYPE_CHECKING:
    from torch import Tensor, nn


class LoraLayers(RankedLayers):
    """What differs in some of the layers of LoRA and DoRA."""

    alpha: Annotated[float, Field(gt=0)] | None = None
    """alpha in these layers; null: as without this entry."""


class Lora(TargetedMethod):
    """Train low-rank updates of frozen linear layers and convolutions."""

    method: Literal["lora"] = "lora"
    """LoRA: train low-rank updates of frozen weights; the result is a small file that other tools load."""
    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of each update. A higher rank gives more capacity and a larger file."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Numerator of the scale alpha / rank that multiplies each update; null: alpha = rank, so the scale is 1."""
    conv_rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    """LoCon: rank of the updates of a U-Net's convolutions with a kernel larger than 1x1 (kohya's conv_dim). With a
    named value of targets, all layers of its residual blocks, downsamplers and upsamplers train as well, with this rank
    in convolutions and rank in the others. null: these convolutions get no update."""
    conv_alpha: Annotated[float, Field(gt=0)] | None = None
    """alpha of these convolutions; null: conv_rank, so their scale is 1."""
    rank_stabilized: bool = False
    """rsLoRA: scale each update by alpha / sqrt(rank) instead of alpha / rank, so that high ranks learn as fast as low
    ones (arXiv:2312.03732). With alpha null the scale is sqrt(rank)."""
    targets: Targets = "attention"
    """Layers to update. attention: every projection of the attention (to_q, to_k, to_v, to_out.0 and, in SD3 and
    Qwen-Image, the text stream's); attention_qv: only its queries and values; attention_image: the image stream's
    projections (SD3 and Qwen-Image, which begins with it); attention_mlp: attention and feed-forward; all_linear: every
    linear layer of the transformer blocks, and of a U-Net also proj_in and proj_out (1x1 convolutions in SD 1.5), as
    kohya's scripts do; or a list of name endings such as ["attn.to_q", "ff.net.2"]."""
    layers: list[LoraLayers] = []
    """Other ranks, alphas and learning rates for some of these layers, by a pattern of their names, such as
    [{"pattern": "blocks.0-11", "rank": 4}, {"pattern": "to_out", "lr_ratio": 0}]. Where several entries match a layer
    and set a field, the last one counts. Without an alpha of their own, layers have adapter.alpha, or conv_alpha; if
    that is null, their rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the input of each update."""
    rank_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Rank dropout: the probability of dropping each rank of an update, drawn for every layer and forward pass. Those
    kept are scaled by 1 / (1 - rank_dropout)."""
    module_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Module dropout: the probability of dropping the whole update of a layer, drawn for every forward pass."""
    max_norm: Annotated[float, Field(gt=0)] | None = None
    """Max-norm regularisation: after each step, scale down every update whose Frobenius norm, of scale times B A,
    exceeds this, as kohya's scale_weight_norms does; null: no limit."""
    b_lr_ratio: Annotated[float, Field(gt=0)] = 1.0
    """LoRA+: the learning rate of the second factor, lora_B, as a multiple of optimizer.lr, which the first one uses
    (arXiv:2402.12354). 16 is typical, with a lower optimizer.lr."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the updates, their gradients and the file. bf16 halves their size; keep optimizer.rounding
    stochastic, or small changes are lost."""

    start: StartName = None
    """LoRA to start from instead of from zero: a file in any layout, a run, RUN@STEP or a hub name, for LoRA with an
    optional strength as in my.safetensors:0.8. Another rank gets the best approximation of its product. Read once,
    before the first step; takes no memory. null: start from zero."""

    holds_lora: ClassVar[bool] = True
    output_name: ClassVar[str] = OUTPUT

    def rank_of(self, layer: str) -> int:
        return super().rank_of(layer) or self.rank

    def scale_of(self, layer: str) -> float:
        rank = self.rank_of(layer)
        common = self.conv_alpha if is_convolution(layer) else self.alpha
        alpha = self.setting("alpha", layer) or common or rank
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def size_of(self, layers: Sequence[str], shapes: Shapes) -> str:
        return f"{super().size_of(layers, shapes)}, scale {spread(map(self.scale_of, layers))}"

    def trainable(self, shapes: Shapes) -> int:
        weights = ((name, shapes[f"{name}.weight"]) for name in self.modules(shapes))
        return sum(self.rank_of(name) * (shape[0] + math.prod(shape[1:])) for name, shape in weights)

    def problems(self, shapes: Shapes) -> Iterator[Problem]:
        yield from super().problems(shapes)
        if self.conv_alpha is not None and self.conv_rank is None:
            yield Problem(
                "adapter.conv_alpha",
                f"{self.conv_alpha:g} has no effect without adapter.conv_rank. Set that, or leave this out",
            )

    def attach(self, model: nn.Module, seed: int) -> None:
        """Freeze the model and add the updates, with weights in ``dtype`` and matmuls in the activations' type."""
        from peft import LoraConfig, inject_adapter_in_model

        from simpletune.adapters.methods.formulas import FLOATS
        from simpletune.adapters.methods.layers import freeze_for_updates
        from simpletune.adapters.methods.lora_layers import (
            UpdateDropout,
            cast_together,
            compute_in_output_type,
            lora_layers,
        )

        names = self.modules(freeze_for_updates(model, seed))
        ranks = {name: self.rank_of(name) for name in names}
        alphas = {name: self.scale_of(name) * rank for name, rank in ranks.items()}
        config = LoraConfig(
            r=self.rank,
            lora_alpha=(alpha := self.scale_of("") * self.rank_of("")),
            rank_pattern=_by_value(ranks, self.rank),
            alpha_pattern=_by_value(alphas, alpha),
            lora_dropout=self.dropout,
            target_modules=names,
        )
        inject_adapter_in_model(config, model)
        compute_in_output_type(model, FLOATS[self.dtype])
        if self.rank_dropout or self.module_dropout:
            for _, layer in lora_layers(model):
                layer.update_dropout = UpdateDropout(self.rank_dropout, self.module_dropout)
        cast_together(model.get_submodule(name) for name in getattr(model, "units", ()))  # of a denoiser

    def lr_ratio(self, name: str) -> float:
        return super().lr_ratio(name) * (self.b_lr_ratio if ".lora_B." in name else 1.0)

    def constrain(self, model: nn.Module) -> None:
        from simpletune.adapters.methods.lora_layers import limit_norm

        if self.max_norm is not None:
            for name, a, b in self.factors(model):
                limit_norm(a, b, self.scale_of(name), self.max_norm)

    def factors(self, model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the layer's name, A and B of every update."""
        from simpletune.adapters.methods.lora_layers import lora_factors

        return lora_factors(model)

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write pytorch_lora_weights.safetensors in the layout that most tools read: diffusers' for SD3, with the scale
        folded into lora_B; kohya's for a U-Net, with the scale as alpha."""
        from simpletune.adapters.files.updates import LoraUpdate
        from simpletune.adapters.files.write import adapter_metadata, file_tensors
        from simpletune.system.safetensors_file import write_safetensors

        updates = {}
        for name, a, b in self.factors(model):
            down, up = a.detach(), b.detach()
            updates[name] = LoraUpdate(down.flatten(1), up.flatten(1), self.scale_of(name), tuple(down.shape[2:]))
        layout = result_layout(model)
        extra = {} if layout.alpha else adapter_metadata(updates, layout.names)
        return write_safetensors(file_tensors(updates, layout), folder / OUTPUT, {**metadata, **extra})


def _by_value(values: Mapping[str, float], common: float) -> dict[str, float]:
    """Return PEFT's patterns for layers whose value is not the common one: one for each value, because PEFT tries every
    pattern on every layer."""
    layers: dict[float, list[str]] = {}
    for name, value in values.items():
        if value != common:
            layers.setdefault(value, []).append(re.escape(name))
    return {f"^({'|'.join(names)})": value for value, names in layers.items()}
