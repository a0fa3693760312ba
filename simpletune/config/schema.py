"""The configuration of a run: composes the options and holds the rules between them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from simpletune.adapters import Adapter
from simpletune.adapters.lora import Lora
from simpletune.config.checkpoints import Checkpoint
from simpletune.data import Data
from simpletune.ema import Ema
from simpletune.flow import Objective
from simpletune.memory import Memory
from simpletune.models import Model
from simpletune.models.buckets import STEP
from simpletune.models.sd3_shapes import Shape, is_conditioning
from simpletune.optim import Optimizer
from simpletune.optim.adamw import AdamW
from simpletune.optim.schedule import Constant, Schedule
from simpletune.options import Option, Problem, plural, shortened
from simpletune.profiling.option import Profile
from simpletune.quant import Precision
from simpletune.quant.plain import BF16
from simpletune.speed import Speed

DEMO = "demo:"
DEFAULT_STEPS = 1000


class Train(Option):
    """How long, in what portions, and with what care."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps; or give epochs."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Epochs: every sample (each picture ``data.repeats`` times) counts once in each; or give steps."""
    batch_size: Annotated[int, Field(ge=1)] = 1
    """Pictures in one forward pass, all of one shape."""
    gradient_accumulation: Annotated[int, Field(ge=1)] = 1
    """Forward passes per step; the batch that counts is batch_size times this. The last step of an epoch has those that
    are left."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Everything random follows from it and the step."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this norm; null: not clipped."""
    clip: Literal["global", "per_parameter"] = "global"
    """What clip_norm is the norm of. global: all gradients together, the common meaning; per_parameter: the gradient of
    each parameter by itself, which bounds it but changes proportions between parameters: the only clipping with
    memory.optimizer_in_backward."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When the loss or a gradient is NaN or infinite. stop: the run ends and says which samples and parameters; skip:
    the step leaves the weights as they are, and five in a row end the run. To know in time, skip reads the loss before
    the weights are updated."""


def _share_or_number(split: float) -> float:
    if split <= 0 or split >= 1 and not isinstance(split, int):
        raise ValueError(
            f"{split} is neither a share between 0 and 1 nor a whole number of pictures. Use 0.1, or 20, or null"
        )
    return split


class Validation(Option):
    """Pictures, and the loss at fixed noise: what the run has changed."""

    prompts: list[Annotated[str, Field(min_length=1)]] | None = None
    """What to draw; null: the caption of the first sample. An empty list: draw nothing."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Steps between pictures; null: before and after only."""
    seed: int = 0
    """Prompt number n is drawn from noise of seed + n."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 20
    """Sampling steps."""
    guidance: Annotated[float, Field(ge=1)] = 4.5
    """Classifier-free guidance; 1: none."""
    width: Annotated[int, Field(ge=STEP, multiple_of=STEP)] | None = None
    """Width in pixels; null: the training resolution."""
    height: Annotated[int, Field(ge=STEP, multiple_of=STEP)] | None = None
    """Height in pixels; null: the training resolution."""
    eval_samples: Annotated[int, Field(ge=0, le=4096)] = 16
    """Size of the fixed set of (picture, noise level, noise) that eval_loss is a mean over; 0: none. Without a split it
    is the loss on training pictures at fixed noise, which also falls while a model overfits; with one it is the
    validation loss."""
    split: Annotated[float | int, AfterValidator(_share_or_number)] | None = None
    """Pictures that are held out: never trained on, and what eval_loss is computed on. A share between 0 and 1: each
    picture is held out or not by the hash of its own bytes, so that adding pictures moves none, and the number held out
    is near the share, not equal to it. A whole number: the pictures with so many of the lowest hashes; adding pictures
    may move some. Copies of a picture fall on the same side. null: none is held out."""


class Tracking(Option):
    """Where figures and pictures of a run are shown. What fails here never fails a run."""

    tensorboard: bool = True
    """Event files for TensorBoard under output.profiles."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases: offline writes into the run's folder, for `wandb sync` later; online sends while training, and
    goes on offline where there is no API key: it never asks for one."""
    wandb_project: Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")] = "simpletune"
    """The project of wandb."""


class Output(Option):
    """Where things are written, relative to the current folder."""

    runs: str = "runs"
    """A folder per run: configuration, metrics, samples, checkpoints, the result."""
    profiles: str = "profiles"
    """TensorBoard's folder: scalars, pictures, traces."""
    cache: str = ".cache"
    """Latents and prompt embeddings by content, shared by all runs."""
    report: bool = True
    """Write report.html and report.md into the run's folder at its end."""


class TrainConfig(Option):
    """A run of simpletune."""

    schema_: str | None = Field(default=None, alias="$schema")
    """For editors: where the JSON schema is."""
    version: Literal[1] = 1
    """Version of this format."""
    about: str = ""
    """What this configuration is for and what it needs. Overrides of more than where a run writes and what it shows
    leave it out: it would speak of other data or settings."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """The run's name: its folder under runs/ and profiles/. An older run of the name moves to NAME.1, NAME.2, ...;
    where a run has such a name, the next number is taken. Windows holds no folder named con, nul or aux."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: the GPU, and the CPU for the demo model only; cpu: the CPU, knowingly."""
    model: Model = Model()
    """What is fine-tuned."""
    data: Data
    """What it learns from."""
    adapter: Adapter = Lora()
    """What is trained."""
    precision: Precision = BF16()
    """How the base model's weights are held."""
    optimizer: Optimizer = AdamW()
    """How weights are updated."""
    schedule: Schedule = Constant()
    """How the learning rate changes."""
    objective: Objective = Objective()
    """How noise levels are drawn."""
    train: Train = Train()
    """How long and in what portions."""
    ema: Ema | None = None
    """Average the trained weights over steps; null: the last step's weights are the result."""
    memory: Memory = Memory()
    """What is given for less memory."""
    speed: Speed = Speed()
    """What makes a step faster."""
    checkpoint: Checkpoint = Checkpoint()
    """When the state is saved."""
    validation: Validation = Validation()
    """Pictures, and the loss on fixed or held-out pictures."""
    profile: Profile = Profile()
    """Profiler traces."""
    tracking: Tracking = Tracking()
    """TensorBoard and wandb."""
    output: Output = Output()
    """Where things are written."""

    @property
    def is_demo(self) -> bool:
        """Whether the model is the one that comes with the tool."""
        return self.model.pretrained.startswith(DEMO)

    def picture_size(self) -> tuple[int, int]:
        """(width, height) of validation pictures in pixels."""
        return self.validation.width or self.data.resolution, self.validation.height or self.data.resolution

    def steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run."""
        if self.train.epochs is not None:
            return self.train.epochs * steps_per_epoch
        return self.train.steps or DEFAULT_STEPS

    def rules(self) -> Iterator[Problem]:
        """Combinations that cannot work: asked of what components can do, not of their names."""
        if self.adapter.trains_base and not self.precision.trainable:
            yield Problem(
                "precision.weights",
                f"{self.precision.weights} weights are frozen, and adapter.method {self.adapter.method} trains them. "
                "Use precision.weights bf16 or fp32, or adapter.method lora",
            )
        if self.memory.modulation == "plan" and self.adapter.trains_base:
            yield Problem(
                "memory.modulation",
                "plan keeps the modulation weights apart from the model, frozen, and adapter.method "
                f"{self.adapter.method} trains and exports the model itself. Use memory.modulation resident, or "
                "adapter.method lora",
            )
        yield from self._streaming_rules()
        yield from self.memory.rules()
        yield from self.precision.rules()
        yield from self._in_backward_rules()
        yield from self.checkpoint.rules()
        if self.train.steps is not None and self.train.epochs is not None:
            yield Problem("train.epochs", "steps and epochs are both given. Keep one of them")
        if self.train.steps is not None and self.schedule.warmup_steps >= self.train.steps:
            yield Problem(
                "schedule.warmup_steps",
                f"{plural(self.schedule.warmup_steps, 'warm-up step')} leave none of "
                f"{plural(self.train.steps, 'step')}. Use fewer",
            )
        if self.validation.split is not None and not self.validation.eval_samples:
            yield Problem(
                "validation.split",
                f"{self.validation.split} holds pictures out, and validation.eval_samples 0 computes no loss on them. "
                "Use a larger eval_samples, or split null",
            )
        for side in ("width", "height"):
            if (getattr(self.validation, side) or 0) > 4096:
                yield Problem(f"validation.{side}", f"{getattr(self.validation, side)} is over 4096 px. Use less")

    def _streaming_rules(self) -> Iterator[Problem]:
        """What cannot be streamed block by block."""
        if self.memory.resident_blocks is None:
            return
        if self.adapter.trains_base and not self.memory.optimizer_in_backward:
            yield Problem(
                "memory.resident_blocks",
                f"adapter.method {self.adapter.method} trains the weights that would be streamed: they must be updated "
                "while they are on the device. Use memory.optimizer_in_backward true, or resident_blocks null",
            )
        if not self.precision.streamable:
            yield Problem(
                "memory.resident_blocks",
                f"{self.precision.weights} weights cannot be brought in block by block. Use null, or precision.weights "
                "int8",
            )

    def _in_backward_rules(self) -> Iterator[Problem]:
        """What needs all gradients at once, where the backward pass frees each as soon as it is used."""
        if not self.memory.optimizer_in_backward:
            return
        if self.train.clip_norm is not None and self.train.clip == "global":
            yield Problem(
                "train.clip",
                "global clipping needs all gradients at once, and memory.optimizer_in_backward frees each as soon as "
                "it is used. Use train.clip per_parameter, or train.clip_norm null",
            )
        if self.train.gradient_accumulation > 1:
            yield Problem(
                "train.gradient_accumulation",
                f"{self.train.gradient_accumulation} passes would add up gradients, and memory.optimizer_in_backward "
                "keeps none. Use gradient_accumulation 1 with a larger batch_size, or optimizer_in_backward false",
            )
        if self.train.on_nonfinite == "skip":
            yield Problem(
                "train.on_nonfinite",
                "skip decides when all gradients are known, and memory.optimizer_in_backward has updated the weights "
                "by then. Use stop, or optimizer_in_backward false",
            )
        if not self.optimizer.steps_in_backward:
            yield Problem(
                "memory.optimizer_in_backward",
                f"{self.optimizer.name} needs all gradients at once. Use another optimizer.name, or false",
            )

    def shape_rules(self, shapes: dict[str, Shape]) -> Iterator[Problem]:
        """Rules that need the base model's parameters."""
        yield from self.adapter.problems(shapes)
        trained = self.trained_modulation(shapes)
        if self.memory.modulation == "plan" and trained and not self.adapter.trains_base:
            yield Problem(
                "memory.modulation",
                f"plan needs frozen modulation weights, and adapter.targets trains {shortened(trained, 1)}. Use "
                "adapter.targets attention, or memory.modulation resident",
            )
        yield from self.memory.shape_rules(shapes)

    def trained_modulation(self, shapes: dict[str, Shape]) -> list[str]:
        """The modules for modulations that the adapter trains."""
        modules = dict.fromkeys(name.rpartition(".")[0] for name in shapes)
        return [name for name in modules if is_conditioning(name) and not self.adapter.is_untouched(name)]


def run_folder(config: TrainConfig) -> Path:
    """Where a run leaves its results."""
    return Path(config.output.runs) / config.name


def profile_folder(config: TrainConfig) -> Path:
    """Where a run leaves what TensorBoard shows."""
    return Path(config.output.profiles) / config.name


def cache_of_bases(config: TrainConfig) -> Path | None:
    """Where quantised bases are kept; None: they are not."""
    return Path(config.output.cache) if config.memory.cache_quantised else None
