"""The results of a simulation: a step's and a whole job's memory and work. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.cuda_libraries import Workspaces, attention_kernel, cublas_workspaces
from simpletune.engine.memory.snapshot import MemorySnapshot
from simpletune.estimate.timing.sections import StreamWork
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.model_config import Shape
from simpletune.system.options import Json

L4 = (8, 9)  # whose kernels are counted if no device is named
STAGE_THREADS = {"text": 1, "class": 1, "latents": 1, "train": 2, "validate": 2}  # that multiply matrices on the device
SIMULATED = 3  # sampling steps: by the third, everything that earlier steps leave behind is allocated


def kernel_of(config: TrainConfig, capability: tuple[int, int]) -> str:
    """Return the kernel of a run's attention without a mask on a card; see ``attention_kernel``."""
    return attention_kernel(capability, config.precision.settled_compute, config.speed.attention)


@dataclass(frozen=True)
class StepReport:
    """Device memory of training, in bytes as ``torch.cuda.max_memory_allocated`` counts them."""

    peak: MemorySnapshot
    phases: Mapping[str, MemorySnapshot]
    """The largest snapshot of each phase."""
    steady: MemorySnapshot
    """Memory allocated between two steps."""
    host_bytes: int
    """Host memory used by the levers."""
    shared_bytes: int
    """The part of ``host_bytes`` that a machine's processes share: frozen weights."""
    trained: Mapping[str, Shape]
    """Names and shapes of the trained parameters."""
    trained_bytes: int
    state_bytes: int
    """Size of the optimizer state, on device and host."""
    average_bytes: int
    """Size of the EMA, if the run has one."""
    seconds: float
    """Duration of the simulation."""
    sections: Sequence[StreamWork] = ()
    """The step's work on host and device, in order; empty if nothing recorded it."""

    def as_json(self) -> Json:
        """Return the report as plain values."""
        return {**asdict(replace(self, sections=())), "sections": [section.as_json() for section in self.sections]}

    @classmethod
    def from_json(cls, data: Json) -> StepReport:
        """Make a report from the result of ``as_json``."""
        built = {
            "peak": MemorySnapshot(**data["peak"]),
            "phases": {name: MemorySnapshot(**snapshot) for name, snapshot in data["phases"].items()},
            "steady": MemorySnapshot(**data["steady"]),
            "trained": {name: tuple(shape) for name, shape in data["trained"].items()},
            "sections": [StreamWork.from_json(each) for each in data["sections"]],
        }
        return cls(**{**data, **built})


@dataclass(frozen=True)
class JobReport:
    """Memory of the whole job, and its work."""

    stages: Mapping[str, MemorySnapshot]
    """The largest snapshot of each stage: ``text``, ``latents``, ``train``, ``class`` if the run draws class pictures,
    and ``validate`` if it validates. ``text`` is the largest encoder's snapshot, not counting encoders that run in
    every training step, and names the encoder as module; empty if there is none. The phase of ``validate`` is
    ``sample``, ``decode`` or ``evaluate``."""
    train: StepReport
    part_bytes: Mapping[str, int]
    """Size of each frozen part at 2 bytes per parameter, as in the hub's files."""
    work: Mapping[str, Sequence[StreamWork]] = field(default_factory=dict)
    """The job's work on host and device, by part: ``text.ENCODER`` for ``2 * BATCH`` prompts, ``latents`` for one
    picture, ``evaluate`` for one sample, ``draw`` and ``class`` for a picture of ``SIMULATED`` steps."""

    def as_json(self) -> Json:
        """Return the report as plain values."""
        return {
            "stages": {name: asdict(snapshot) for name, snapshot in self.stages.items()},
            "train": self.train.as_json(),
            "part_bytes": dict(self.part_bytes),
            "work": {name: [each.as_json() for each in part] for name, part in self.work.items()},
        }

    @classmethod
    def from_json(cls, data: Json) -> JobReport:
        """Make a report from the result of ``as_json``."""
        stages = {name: MemorySnapshot(**snapshot) for name, snapshot in data["stages"].items()}
        work = {name: [StreamWork.from_json(each) for each in part] for name, part in data["work"].items()}
        return cls(stages, StepReport.from_json(data["train"]), data["part_bytes"], work)


def square_size(config: TrainConfig) -> Size:
    """Return the image size that a prediction without data assumes."""
    return config.resolution, config.resolution


def parts_in_steps(config: TrainConfig) -> set[str]:
    """Return the parts of the text encoders that run in every training step, instead of once before."""
    resident = config.text.resident(config.model.text.trainable)
    return {config.model.text.regions()[name].part for name in resident} if resident else set()


def with_workspace(snapshot: MemorySnapshot, workspaces: Workspaces) -> MemorySnapshot:
    """Add the libraries' workspaces to a snapshot."""
    product = snapshot.bytes if snapshot.in_products is None else snapshot.in_products
    total = workspaces.kept + max(snapshot.bytes, product + workspaces.within)
    by_kind = dict(snapshot.by_kind)
    if total > snapshot.bytes:
        by_kind["workspace"] = by_kind.get("workspace", 0) + total - snapshot.bytes
    return replace(snapshot, bytes=total, by_kind=by_kind)


def with_workspaces(job: JobReport, capability: tuple[int, int], deterministic: bool = False) -> JobReport:
    """Add the workspaces of a CUDA device's libraries to every stage; ``deterministic``: ``speed.deterministic``."""
    taken = {name: cublas_workspaces(capability, STAGE_THREADS[name], deterministic) for name in job.stages}
    return replace(job, stages={name: with_workspace(each, taken[name]) for name, each in job.stages.items()})
