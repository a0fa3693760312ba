"""LoRA: low-rank updates of frozen linear layers (arXiv:2106.09685), with PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.adapters.adapter import Shapes, TrainingMethod
from simpletune.options import Problem

if TYPE_CHECKING:
    from torch import nn

ATTENTION_IMAGE = tuple(f"{name}.to_{which}" for name in ("attn", "attn2") for which in ("q", "k", "v", "out.0"))
ATTENTION_TEXT = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out")
NAMED_TARGETS = {"attention": ATTENTION_IMAGE + ATTENTION_TEXT, "attention_image": ATTENTION_IMAGE}
OUTPUT = "pytorch_lora_weights.safetensors"


class Lora(TrainingMethod):
    """Train low-rank updates of frozen linear layers."""

    method: Literal["lora"] = "lora"
    """LoRA: train low-rank updates of frozen weights; the result is a small file that other tools load."""
    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of each update. A higher rank gives more capacity and a larger file."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Numerator of the scale alpha / rank that multiplies each update; null: alpha = rank, so the scale is 1."""
    targets: Literal["attention", "attention_image", "all_linear"] | Annotated[list[str], Field(min_length=1)] = (
        "attention"
    )
    """Linear layers to update. attention: the eight projections of each attention, and the four of a second attention
    (attn2, SD3.5 Medium); attention_image: only those of the image stream; all_linear: every linear layer of the
    blocks; or a list of name endings such as ["attn.to_q", "ff.net.2"]."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the input of each update."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the updates, their gradients and the file. bf16 halves their size; keep optimizer.rounding
    stochastic, or small changes are lost."""

    output_name: ClassVar[str] = OUTPUT

    @property
    def scale(self) -> float:
        """Return alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def modules(self, shapes: Shapes) -> list[str]:
        """List the linear layers that get an update, from the base model's shapes."""
        linears = [name.removesuffix(".weight") for name, shape in shapes.items() if _is_linear(name, shape)]
        return [name for name in linears if self._is_target(name)]

    def _is_target(self, linear: str) -> bool:
        if self.targets == "all_linear":
            return linear.startswith("transformer_blocks.")
        endings = NAMED_TARGETS[self.targets] if isinstance(self.targets, str) else self.targets
        return any(linear == e or linear.endswith("." + e) for e in endings)

    def is_untouched(self, module: str) -> bool:
        """Tell whether a module gets no update."""
        return not self._is_target(module)

    def describe(self, shapes: Shapes) -> str:
        """Describe what is trained."""
        targets = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
        return (
            f"LoRA of rank {self.rank}, scale {self.scale:g}, on {len(self.modules(shapes))} linear layers ({targets})"
        )

    def trainable(self, shapes: Shapes) -> int:
        """Sum rank x (inputs + outputs) over all targets."""
        return sum(self.rank * sum(shapes[f"{name}.weight"]) for name in self.modules(shapes))

    def problems(self, shapes: Shapes) -> Iterator[Problem]:
        """Report target endings that match no linear layer."""
        if isinstance(self.targets, str):
            return
        for ending in self.targets:
            if not Lora(targets=[ending]).modules(shapes):
                yield Problem(
                    "adapter.targets", f"{ending!r} matches no linear layer. Use endings such as attn.to_q, ff.net.2"
                )

    def attach(self, model: nn.Module, seed: int) -> None:
        """Freeze the model and add the updates, with weights in ``dtype`` and matmuls in the activations' type."""
        import torch
        from peft import LoraConfig, inject_adapter_in_model

        from simpletune.adapters.lora_layers import compute_in_output_type
        from simpletune.system.rng import reseed_global

        model.requires_grad_(False)
        reseed_global(seed, "adapter")
        shapes = {f"{name}.weight": (module.out_features, module.in_features) for name, module in _linears(model)}
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.scale * self.rank,
            lora_dropout=self.dropout,
            target_modules=self.modules(shapes),
        )
        inject_adapter_in_model(config, model)
        compute_in_output_type(model, {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype])

    def disabled(self, model: nn.Module) -> AbstractContextManager[None]:
        """Disable the updates within this context, which restores the exact base model."""
        from simpletune.adapters.lora_layers import updates_disabled

        return updates_disabled(model)

    def export(self, model: nn.Module, folder: Path, metadata: dict[str, str]) -> Path:
        """Write pytorch_lora_weights.safetensors in diffusers' layout, with the scale folded into lora_B.

        Other tools silently ignore a scale in the header; when folded in, all of them apply it. In bf16, a scale that
        is not a power of two rounds lora_B once more.
        """
        from simpletune.adapters.lora_layers import lora_state
        from simpletune.system.safetensors_file import write_safetensors

        state = {}
        for name, tensor in lora_state(model).items():
            folded = (tensor.float() * self.scale).to(tensor.dtype) if ".lora_B." in name else tensor
            state[f"transformer.{name}"] = folded
        return write_safetensors(state, folder / OUTPUT, metadata)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(".weight") and len(shape) == 2


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    from torch import nn

    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
