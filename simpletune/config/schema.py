"""Define the configuration of a run: its options. Imports no torch."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NewType

from pydantic import Field

from simpletune.adapters.methods import Adapter
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.text.text_option import Text
from simpletune.config.checkpoint import Checkpoint
from simpletune.config.output import Output
from simpletune.config.prior import NoPrior, Prior
from simpletune.config.tracking import Tracking
from simpletune.config.train import Train
from simpletune.config.validation import Validation
from simpletune.data.concept import Concept
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.multi_source import Data, MultiSource, inpainting_rules
from simpletune.data.sources.source import Source
from simpletune.data.sources.stream import Stream
from simpletune.data.sources.table import Table
from simpletune.engine.memory import Memory
from simpletune.engine.optim import Optimizer
from simpletune.engine.optim.ema import Ema
from simpletune.engine.optim.options import AdamW
from simpletune.engine.optim.schedule import Constant, Schedule
from simpletune.engine.profiling.profile_option import Profile
from simpletune.engine.quant import Precision
from simpletune.engine.quant.precision import BF16
from simpletune.engine.speed import Speed
from simpletune.models.families import Model
from simpletune.models.objectives import Objective
from simpletune.models.objectives.flow import Flow
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.shared.model_config import Shape
from simpletune.system.options import Option, Problem, UserError, join_names

DEMO = "demo:"
DEFAULT_STEPS = 1000
MOST_TRAINED = 12_000_000_000  # weights of the base; the largest tried has 8 billion (SD3.5 Large)
_LONGEST_NAME = 80  # characters of one made from a text; a run's may have 100, and moving an older run appends a number
_RESERVED_NAMES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?$", re.IGNORECASE)  # by Windows


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
    data: Annotated[Folder | Table | Stream | MultiSource | None, Field(discriminator="source")] = None
    """Pictures and captions to train on; null: the run has a concept instead."""
    concept: Concept | None = None
    """Prompts to train a slider from, or to erase a concept, without pictures; in place of data."""
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
    """TensorBoard, wandb, trackio and notifications."""
    output: Output = Output()
    """Folders to write to."""

    @property
    def is_demo(self) -> bool:
        """Tell whether the model is the bundled demo model."""
        return self.model.pretrained.startswith(DEMO)

    @property
    def pictures(self) -> Data:
        """The pictures to train on, ``data``. Raises UserError for a run from prompts alone."""
        if self.data is None:
            raise UserError("data: the run trains from prompts alone (concept), and has no pictures. Name another run")
        return self.data

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of pictures; none for a run from prompts alone."""
        trained_on = self.concept if self.data is None else self.data
        return () if trained_on is None else trained_on.members

    @property
    def resolution(self) -> int:
        """Largest resolution in pixels: the default size of validation pictures, and the size that memory must hold."""
        return max(self.concept.resolutions) if self.concept is not None else self.pictures.resolution

    @property
    def prompt(self) -> str | None:
        """Prompt of all pictures but those for regularization; None if there is no such prompt."""
        return None if self.data is None else self.data.prompt

    def image_size(self) -> tuple[int, int]:
        """Return (width, height) of validation pictures in pixels."""
        return self.validation.width or self.resolution, self.validation.height or self.resolution

    def steps(self, steps_per_epoch: int) -> int:
        """Return the number of optimizer steps of the whole run."""
        if self.train.epochs is not None:
            return self.train.epochs * steps_per_epoch
        return self.train.steps or DEFAULT_STEPS

    def shape_rules(self, shapes: dict[str, Shape]) -> Iterator[Problem]:
        """Check the rules that need the base model's parameter shapes."""
        yield from self.adapter.problems(shapes)
        sizes = ((name, math.prod(shape)) for name, shape in shapes.items() if self.adapter.trains_base)
        whole = sum(count for name, count in sizes if self.adapter.trains_weight(name))
        if whole > MOST_TRAINED:
            weights, states = (
                whole * each / 2**30 for each in (self.precision.bytes_per_weight, self.optimizer.bytes_per_parameter)
            )
            yield Problem(
                "adapter.method",
                f"{self.adapter.method} trains {whole:,} weights, which take {weights:.0f} GiB, their gradients as "
                f"much, and the states of {self.optimizer.name} {states:.0f} GiB: {2 * weights + states:.0f} GiB "
                f"together. At most {MOST_TRAINED:,} are trained. Use adapter.method lora, or partial",
            )
        new = self.model.architecture.new_weights
        if new is not None and not self.adapter.trains_weight(new):
            yield Problem(
                "model.inpainting",
                f"true gives {self.model.files.weights_from} input channels whose weights begin at zero, and "
                f"adapter.method {self.adapter.method} does not train {new}. Use adapter.method full, or partial with "
                f"{new} in adapter.layers; or name an inpainting model",
            )
        trained = self.trained_modulation(shapes)
        if self.memory.modulation == "plan" and trained and not self.adapter.trains_base:
            yield Problem(
                "memory.modulation",
                f"plan needs frozen modulation weights, but adapter.targets trains {join_names(trained, 1)}. Use "
                "adapter.targets attention, or memory.modulation resident",
            )
        network = self.model.architecture
        yield from self.memory.model_rules(len(network.units_among(shapes)), network.modulation is not None)
        if self.data is not None:
            yield from inpainting_rules(self.data, self.model)
        elif self.model.inpaints:
            yield Problem(
                "concept",
                f"{self.model.files.weights_from} inpaints, and a concept has no pictures to paint into. Name a model "
                "that draws whole pictures",
            )

    @property
    def trains_conditioning(self) -> bool:
        """Whether the text side trains what modulations are made from, the pooled prompt."""
        modulation = self.model.architecture.modulation
        reads_pooled = modulation is not None and modulation.reads_pooled
        return reads_pooled and bool(self.text.resident(self.model.text.trainable))

    @property
    def tabulates_modulations(self) -> bool:
        """Whether a run keeps the modulations of its noise levels in host memory, in place of the layers that make
        them."""
        modulation = self.model.architecture.modulation
        made_ahead = self.memory.modulation == "plan" and modulation is not None and not modulation.reads_pooled
        in_file = self.memory.cache_quantised and self.precision.cacheable and self.model.init != "random"
        return made_ahead and in_file and self.objective.draws_from_few and bool(self.sources)

    @property
    def tabulated_levels(self) -> list[float]:
        """The noise levels whose modulations a run keeps in host memory."""
        if not self.tabulates_modulations:
            return []
        shifts = {self.objective.shift_at(source.resolution) for source in self.sources}
        return sorted({level for shift in shifts for level in self.objective.levels_at(shift)})

    def trained_modulation(self, shapes: dict[str, Shape]) -> list[str]:
        """List the modulation modules that the adapter trains."""
        if (modulation := self.model.architecture.modulation) is None:
            return []
        modules = dict.fromkeys(name.rpartition(".")[0] for name in shapes)
        return [name for name in modules if modulation.serves(name) and not self.adapter.is_untouched(name)]


ResolvedConfig = NewType("ResolvedConfig", TrainConfig)
"""A configuration whose names of demos are folders, and whose model has been downloaded (``resolve_folders``)."""
SettledConfig = NewType("SettledConfig", ResolvedConfig)
"""One that also has no ``auto`` left that decides how a step is computed (``training.set_up``)."""


def run_name(text: str, default: str = "imported") -> str:
    """Return the closest name to a text that ``TrainConfig.name`` accepts; ``default`` if no character is valid."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", plain).strip("._-")[:_LONGEST_NAME].rstrip("._-")
    if not name:
        return default
    return f"{default}-{name}" if _RESERVED_NAMES.match(name) else name


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
