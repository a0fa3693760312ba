"""The options of optimizers: a class each, discriminated by ``optimizer.name``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.engine.optim.state import STATE_KEY, State
from simpletune.system.options import Json, Option, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.engine.optim.ema import Average
    from simpletune.engine.optim.place import ParameterRange

Beta = Annotated[float, Field(ge=0, lt=1)]
PAGED_FROM = 100_000  # elements; bitsandbytes does not page smaller state


class OptimizerOption(Option):
    """Fields shared by all optimizers. Members define ``name`` (the tag)."""

    lr: Annotated[float, Field(gt=0, le=100)] = 1e-4
    """Learning rate after warm-up. Common values: 1e-4 for LoRA; 1e-5 to 5e-5 for full fine-tuning with batch size 4 or
    more."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Rounding of bf16 weights after an update. nearest loses small updates, so full fine-tuning in bf16 stalls."""

    bytes_per_parameter: ClassVar[float]
    """Bytes of optimizer state per trained fp32 parameter."""

    same_in_fp32: ClassVar[str | None] = None
    """The optimizer that does the same with state in fp32, for one with 8-bit state."""
    draws: ClassVar[bool] = False
    """Whether the optimizer itself draws random numbers."""
    steps_in_backward: ClassVar[bool] = True
    """Whether a parameter's update needs no other parameter's gradient."""
    undoes: ClassVar[bool] = True
    """Whether an update can be undone on the device, as a step with fp16 products needs."""
    averages: ClassVar[bool] = False
    """Whether the optimizer itself averages the weights, and takes no other schedule than a constant one."""
    no_fsdp_reason: ClassVar[str | None] = None
    """Why it cannot update a shard of a parameter by itself; None: it can."""

    def rules(self) -> Iterator[Problem]:
        """Report problems of the options on their own."""
        yield from ()

    def build(
        self,
        parameters: Iterable[nn.Parameter],
        in_backward: bool = False,
        ratios: Sequence[float] | None = None,
        places: Sequence[ParameterRange] | None = None,
    ) -> torch.optim.Optimizer:
        """Build the optimizer. With stochastic rounding, bf16 parameters step in fp32, a few at a time.

        Args:
            parameters: the parameters to train.
            in_backward: whether each is updated separately (``RoundedOptimizer.update``).
            ratios: a factor on each parameter's learning rate; None: 1 for all.
            places: the place of each parameter in the whole one, if the parameters are shards.
        """
        from simpletune.engine.optim.rounding import RoundedOptimizer

        parameters = list(parameters)
        rounded = self.rounding == "stochastic" and any(parameter.itemsize < 4 for parameter in parameters)
        if rounded or self.draws or in_backward or set(ratios or ()) - {1.0}:
            return RoundedOptimizer(parameters, self.make, rounded, ratios, places)
        return self.make(parameters)

    def place(self, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
        """Move a loaded state tensor to its parameter's device, except for step counters."""
        return value if name == "step" else value.to(parameter.device)

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the underlying optimizer, whose ``step`` neither reads device tensors nor waits for the device."""
        raise NotImplementedError

    def load_state(self, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], scalars: Json) -> None:
        """Restore the result of ``state_to_tensors`` bit for bit; move each tensor to where the optimizer needs it."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        merged: State = {**tensors, **scalars["values"]}
        moved: dict[str, Tensor] = {}
        for key, source in {**{key: key for key in merged}, **scalars["shared"]}.items():
            match = STATE_KEY.match(key)
            if match is None:
                raise ValueError(f"optimizer state has an invalid name: {key}")
            parameter = parameters[int(match[1])]
            value = merged[source]
            if key in scalars["shared"] or source in scalars["shared"].values():
                place = f"{source}@{parameter.device}"
                if place not in moved:
                    moved[place] = value.to(parameter.device, copy=True)
                value = moved[place]
            elif source in tensors:
                placed = self.place(parameter, match[2], value)
                # Not a view of the file: Windows does not remove a checkpoint that is mapped.
                value = value.clone() if placed is value else placed
            optimizer.state[parameter][match[2]] = value

    def average(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Average | None:
        """Return the average that the optimizer keeps for generating, evaluating and exporting, or None."""
        return None


class AdamW(OptimizerOption):  # PyTorch's (arXiv:1711.05101)
    """AdamW with state in the parameters' type."""

    name: Literal["adamw"] = "adamw"
    """AdamW; 8 bytes of state per fp32 parameter."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator for numerical stability."""

    bytes_per_parameter: ClassVar[float] = 8

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(  # fused: one pass over all parameters without temporaries
            parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=True
        )

    def place(self, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
        return value.to(parameter.device)  # the step counter too: the fused update reads it there


# bitsandbytes' optimizers with 8-bit state (arXiv:2110.02861): tensors with fewer than 4096 elements keep fp32 state.
class AdamW8bit(OptimizerOption):
    """AdamW with 8-bit state."""

    name: Literal["adamw8bit"] = "adamw8bit"
    """AdamW with 8-bit state: 2 bytes per parameter."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator for numerical stability."""

    same_in_fp32: ClassVar[str | None] = "adamw"
    bytes_per_parameter: ClassVar[float] = 2.03

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        from simpletune.engine.optim.eight_bit_steps import QueuedAdamW8bit

        return QueuedAdamW8bit(parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


class PagedAdamW8bit(OptimizerOption):
    """AdamW with 8-bit state that the driver pages between host and device. Equals adamw8bit on the CPU."""

    name: Literal["paged_adamw8bit"] = "paged_adamw8bit"
    """AdamW with 8-bit state that is paged to host memory when the GPU is full."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator for numerical stability."""

    same_in_fp32: ClassVar[str | None] = "adamw"
    bytes_per_parameter: ClassVar[float] = 2.03
    no_fsdp_reason: ClassVar[str | None] = "pages state to host memory, of which each process has only a part"
    undoes: ClassVar[bool] = False  # the host would read the paged state while the device writes it

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        from simpletune.engine.optim.eight_bit_steps import QueuedAdamW8bit, QueuedPagedAdamW8bit

        parameters = list(parameters)
        kind = QueuedPagedAdamW8bit if parameters[0].device.type == "cuda" else QueuedAdamW8bit
        return kind(parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)

    def place(self, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
        paged = name in ("state1", "state2") and value.numel() >= PAGED_FROM and parameter.device.type == "cuda"
        if not paged:
            return super().place(parameter, name, value)
        from bitsandbytes.functional import get_paged

        buffer = get_paged(*value.shape, dtype=value.dtype, device=parameter.device)
        return buffer.copy_(value)


class Lion8bit(OptimizerOption):
    """Lion (arXiv:2302.06675) with 8-bit state; needs a learning rate 3 to 10 times smaller than AdamW's."""

    name: Literal["lion8bit"] = "lion8bit"
    """Lion with 8-bit state: 1 byte per parameter; needs a learning rate 3 to 10 times smaller than AdamW's."""
    lr: Annotated[float, Field(gt=0, le=100)] = 2e-5
    """Learning rate after warm-up; use 3 to 10 times less than for AdamW."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Weight of the running mean in the update, and its decay rate."""

    bytes_per_parameter: ClassVar[float] = 1.02

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        from simpletune.engine.optim.eight_bit_steps import QueuedLion8bit

        return QueuedLion8bit(parameters, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)


class Adafactor(OptimizerOption):  # arXiv:1804.04235
    """Adafactor with the configured learning rate: factored second moments, no momentum."""

    name: Literal["adafactor"] = "adafactor"
    """Adafactor: almost no state (a row and a column for each matrix), no momentum."""
    clip_threshold: Annotated[float, Field(gt=0)] = 1.0
    """Clip the root mean square of an update to this value."""
    decay_rate: Annotated[float, Field(lt=0)] = -0.8
    """Exponent for the decay rate of the running mean of squares."""

    bytes_per_parameter: ClassVar[float] = 0.01
    no_fsdp_reason: ClassVar[str | None] = "keeps means over whole rows and columns"

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # not torch's own, which reads from the device in every step; so do relative steps and parameter scaling
        from transformers.optimization import Adafactor

        return Adafactor(
            parameters,
            lr=self.lr,
            clip_threshold=self.clip_threshold,
            decay_rate=self.decay_rate,
            weight_decay=self.weight_decay,
            scale_parameter=False,
            relative_step=False,
            warmup_init=False,
        )


class AdamWBF16(OptimizerOption):
    """AdamW with bf16 state and compensated bf16 weights."""

    # A second bf16 number stores the rounding error of each weight and is added before the next update, so the pair has
    # about 16 bits of precision. The running means are rounded stochastically: with rounding to nearest, the mean of
    # squares would not change (a relative change of 1/1000 is below bf16's resolution).

    name: Literal["adamw_bf16"] = "adamw_bf16"
    """AdamW entirely in bf16 with a compensation buffer: 6 bytes of state per parameter."""
    rounding: Literal["compensated"] = "compensated"  # type: ignore[assignment]  # replaces the base class's values
    """Add the rounding error of each weight to its next update (Kahan summation)."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator for numerical stability."""

    bytes_per_parameter: ClassVar[float] = 6
    draws: ClassVar[bool] = True

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        from simpletune.engine.optim.bf16_updates import CompensatedAdamW

        return CompensatedAdamW(parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


class Prodigy(OptimizerOption):
    """Prodigy with decoupled weight decay."""

    # AdamW that estimates its learning rate from the distance to the initial weights (arXiv:2306.06101). The step is
    # our own: the authors' package (prodigyopt 1.1) reads two scalars per parameter from the device in every step, and
    # keeps the estimate outside the state that a checkpoint saves. The tests compare the two.

    name: Literal["prodigy"] = "prodigy"
    """Prodigy: AdamW that estimates its learning rate; 16 bytes of state per fp32 parameter."""
    lr: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Factor on the estimated learning rate; keep it near 1."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    beta3: Beta | None = None
    """Decay rate of the estimate's running sums; null: the square root of the second beta."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator, times the estimate, for numerical stability."""
    d0: Annotated[float, Field(gt=0)] = 1e-6
    """First estimate of the learning rate."""
    d_coef: Annotated[float, Field(gt=0)] = 1.0
    """Factor on later estimates; 0.5 to 2 are common."""
    use_bias_correction: bool = False
    """Correct the running means for their start at 0, as Adam does."""
    safeguard_warmup: bool = False
    """Leave the learning rate out of the estimate's denominator, so that warm-up does not inflate the estimate."""

    bytes_per_parameter: ClassVar[float] = 16
    steps_in_backward: ClassVar[bool] = False
    no_fsdp_reason: ClassVar[str | None] = "estimates one learning rate from all gradients"

    def rules(self) -> Iterator[Problem]:
        if self.lr < 0.1:
            yield Problem(
                "optimizer.lr", f"{self.lr:g} would scale down the learning rate that prodigy estimates. Use 1"
            )

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        from simpletune.engine.optim.prodigy_steps import ProdigySteps

        beta3 = self.betas[1] ** 0.5 if self.beta3 is None else self.beta3
        settings = self.model_dump(include={"lr", "eps", "weight_decay", "d0", "d_coef"})
        flags = {"corrects": self.use_bias_correction, "safeguards": self.safeguard_warmup}
        return ProdigySteps(parameters, settings | flags | {"betas": (*self.betas, beta3)})


class ScheduleFreeAdamW(OptimizerOption):
    """AdamW whose result is an average over the whole run."""

    # Averages the weights instead of lowering the learning rate (arXiv:2405.15682). The step is our own: the authors'
    # package (schedulefree 1.4) keeps its counters outside the state that a checkpoint saves, and counts once per call,
    # although parameters may be updated in portions. The tests compare the two.

    name: Literal["adamw_schedule_free"] = "adamw_schedule_free"
    """Schedule-free AdamW; 8 bytes of state per fp32 parameter. Pictures, the validation loss and the result use the
    average of the weights. Use schedule constant, with or without warm-up."""
    betas: tuple[Annotated[float, Field(gt=0, lt=1)], Beta] = (0.9, 0.999)
    """Share of the average in the weights that gradients are computed at, and decay rate of the running mean of
    squares."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator for numerical stability."""
    r: Annotated[float, Field(ge=0)] = 0.0
    """Weight of step k in the average is proportional to k^r; larger values favour later steps."""
    weight_lr_power: Annotated[float, Field(ge=0)] = 2.0
    """Exponent of the learning rate in that weight; above 0, steps of the warm-up count less."""

    bytes_per_parameter: ClassVar[float] = 8
    averages: ClassVar[bool] = True

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        from simpletune.engine.optim.schedule_free_steps import ScheduleFreeSteps

        return ScheduleFreeSteps(
            parameters, self.model_dump(include={"lr", "betas", "eps", "weight_decay", "r", "weight_lr_power"})
        )

    def average(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Average:
        from simpletune.engine.optim.schedule_free_steps import ScheduleFreeAverage

        return ScheduleFreeAverage(optimizer, parameters, self.betas[0])
