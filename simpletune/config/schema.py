"""Define the configuration of a run: its options. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from simpletune.adapters.methods import Adapter
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.text.option import Text
from simpletune.config.checkpoints import Checkpoint
from simpletune.config.output import Output
from simpletune.config.prior import NoPrior, Prior
from simpletune.config.speed import Speed
from simpletune.config.validation import Validation
from simpletune.data.sources.multi_source import Data
from simpletune.engine.memory import Memory
from simpletune.engine.optim import Optimizer
from simpletune.engine.optim.ema import Ema
from simpletune.engine.optim.options import AdamW
from simpletune.engine.optim.schedule import Constant, Schedule
from simpletune.engine.profiling.option import Profile
from simpletune.engine.quant import Precision
from simpletune.engine.quant.precision import BF16
from simpletune.models.families import Model
from simpletune.models.objectives import Objective
from simpletune.models.objectives.flow import Flow
from simpletune.models.sd3.option import SD3
from simpletune.models.shared.model_config import Shape
from simpletune.system.options import Option, Problem, join_names

DEMO = "demo:"
DEFAULT_STEPS = 1000


class Train(Option):
    """Length of the run, batch size, seed, gradient clipping and handling of NaN."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Number of optimizer steps. Set this or epochs."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Number of epochs. Each epoch uses every sample once: each picture ``data.repeats`` times. Set this or steps."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Number of pictures per forward pass, all of the same shape: a micro-batch. auto: the largest that divides
    global_batch and is predicted to fit; the run keeps the number."""
    gradient_accumulation: Annotated[int, Field(ge=1)] = 1
    """Micro-batches per step, over all processes; the effective batch size is batch_size times this. The last step of
    an epoch may have fewer."""
    global_batch: Annotated[int, Field(ge=1)] | None = None
    """Number of pictures per step, over all processes: a step has global_batch / batch_size micro-batches. Set this
    or gradient_accumulation."""
    reduce: Literal["fast", "exact"] = "fast"
    """Sum of the gradients of a step's micro-batches. fast: each process adds up its own, and all exchange the sums;
    the last bits depend on the number of processes. exact: by a fixed tree in fp32, so that 1, 2, 4 and 8 processes
    give the same bits, and their number may change during a run without changing its results; takes memory for one more
    sum of gradients for each doubling of a process's micro-batches."""
    fsdp: Literal["none", "full"] = "none"
    """How processes divide the weights in full fine-tuning. none: each holds all, with their gradients and optimizer
    state; full: each holds a part (FSDP2), and a block's whole weights only while it computes. One alone holds all."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of all random numbers, which depend only on it and the step."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Maximum gradient norm; null: do not clip."""
    clip: Literal["global", "per_parameter"] = "global"
    """Gradients that clip_norm limits. global: the norm over all gradients, as usual; per_parameter: the norm of each
    parameter's gradient, which changes the proportions between parameters. memory.optimizer_in_backward supports only
    per_parameter."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action when the loss or a gradient is NaN or infinite. stop: end the run and name the samples and parameters;
    skip: leave the weights unchanged, and end the run after five skipped steps in a row. skip waits for the loss before
    each update."""

    @property
    def micro_batch(self) -> int:
        """Pictures per forward pass; 1 while batch_size is auto."""
        return 1 if self.batch_size == "auto" else self.batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches per step, over all processes."""
        return self.gradient_accumulation if self.global_batch is None else self.global_batch // self.micro_batch

    def uses_fsdp(self, processes: int) -> bool:
        """Whether this number of processes divides the weights among them."""
        return self.fsdp == "full" and processes > 1


class Tracking(Option):
    """Log metrics and pictures to trackers. A failing tracker never fails the run."""

    tensorboard: bool = True
    """Write TensorBoard event files under output.profiles."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases. offline: write into the run's folder for a later `wandb sync`; online: upload during training,
    or continue offline without an API key, which it never asks for."""
    wandb_project: Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")] = "simpletune"
    """Project in wandb."""


class TrainConfig(Option):
    """Configure a run of simpletune."""

    schema_: str | None = Field(default=None, alias="$schema")
    """Path of the JSON schema, for editors."""
    version: Literal[1] = 1
    """Version of this format."""
    about: str = ""
    """Purpose and requirements of this configuration. Overrides that make it untrue remove it: all except those of
    where a run writes and what it shows."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the run and of its folders under runs/ and profiles/. An older run of this name moves to NAME.1, NAME.2
    or the next free number. Avoid con, nul and aux, which Windows does not allow as folder names."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on. auto: the GPU, or the CPU for the demo model only; cpu: the CPU for any model."""
    model: Model = SD3()
    """Base model to fine-tune."""
    data: Data
    """Pictures and captions to train on."""
    adapter: Adapter = Lora()
    """Training method."""
    text: Text = Text()
    """What trains on the text side: embeddings of a new token, and a LoRA on the CLIP text encoders."""
    precision: Precision = BF16()
    """Precision of the base model's weights."""
    optimizer: Optimizer = AdamW()
    """Optimizer."""
    schedule: Schedule = Constant()
    """Learning-rate schedule."""
    objective: Objective = Flow()
    """Training objective and density of noise levels."""
    train: Train = Train()
    """Length of the run, batch size, seed and clipping."""
    prior: Prior = NoPrior()
    """Prior preservation: what keeps the class of a subject as it is."""
    ema: Ema | None = None
    """Exponential moving average of the trained weights; null: export the last step's weights."""
    memory: Memory = Memory()
    """Options that save memory."""
    speed: Speed = Speed()
    """Options that save time."""
    checkpoint: Checkpoint = Checkpoint()
    """When to save the state, and what to keep."""
    validation: Validation = Validation()
    """Validation pictures and validation loss."""
    profile: Profile = Profile()
    """Profiler traces."""
    tracking: Tracking = Tracking()
    """TensorBoard and wandb."""
    output: Output = Output()
    """Folders to write to."""

    @property
    def is_demo(self) -> bool:
        """Tell whether the model is the bundled demo model."""
        return self.model.pretrained.startswith(DEMO)

    def picture_size(self) -> tuple[int, int]:
        """Return (width, height) of validation pictures in pixels."""
        return self.validation.width or self.data.resolution, self.validation.height or self.data.resolution

    def steps(self, steps_per_epoch: int) -> int:
        """Return the number of optimizer steps of the whole run."""
        if self.train.epochs is not None:
            return self.train.epochs * steps_per_epoch
        return self.train.steps or DEFAULT_STEPS

    def shape_rules(self, shapes: dict[str, Shape]) -> Iterator[Problem]:
        """Check the rules that need the base model's parameter shapes."""
        yield from self.adapter.problems(shapes)
        trained = self.trained_modulation(shapes)
        if self.memory.modulation == "plan" and trained and not self.adapter.trains_base:
            yield Problem(
                "memory.modulation",
                f"plan needs frozen modulation weights, but adapter.targets trains {join_names(trained, 1)}. Use "
                "adapter.targets attention, or memory.modulation resident",
            )
        yield from self.memory.model_rules(len(self.model.units_among(shapes)), self.model.has_modulation)

    def trained_modulation(self, shapes: dict[str, Shape]) -> list[str]:
        """List the modulation modules that the adapter trains."""
        modules = dict.fromkeys(name.rpartition(".")[0] for name in shapes)
        return [name for name in modules if self.model.is_conditioning(name) and not self.adapter.is_untouched(name)]


def run_folder(config: TrainConfig) -> Path:
    """Return the folder of a run's results."""
    return Path(config.output.folder) / config.name


def run_url(config: TrainConfig) -> str | None:
    """Return the URL of a run in an object store; None if the run is only kept in its folder."""
    return None if config.output.store is None else f"{config.output.store}/{config.name}"


def profile_folder(config: TrainConfig) -> Path:
    """Return the folder of a run's TensorBoard files."""
    return Path(config.output.profiles) / config.name


def cache_of_bases(config: TrainConfig) -> Path | None:
    """Return the cache folder for quantised bases; None if they are not cached."""
    return config.output.cache_folder if config.memory.cache_quantised else None
