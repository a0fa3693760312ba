"""The recorded work of a step, in sections of one stream, phase and module. Imports no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from simpletune.system.options import Json

COMPUTE = "compute"


class KernelWork(NamedTuple):
    """The work of one kernel, or of one on a group of tensors."""

    kind: str
    """The name of a grid of the constants: product_tn, attention, add, norm, ..."""
    dtype: str
    """fp32, bf16 or fp16."""
    extents: tuple[int, ...]
    """Along the grid's axes; for ``each``, the number of tensors and their bytes."""


@dataclass
class StreamWork:
    """Work of one stream without waits in between."""

    stream: str
    """``compute`` or a queue of copies."""
    phase: str
    module: str
    """The running block or other child of the model."""
    share: float = 1.0
    """How much of the work belongs to one step: a fraction of a plan's window, which serves several steps; several
    times that of a phase which an average step repeats."""
    after: list[int] = field(default_factory=list)
    """Events that must complete before it begins."""
    host_after: list[int] = field(default_factory=list)
    """Events that the host waits for first."""
    event: int | None = None
    """The event that completes at its end, if anything waits for it."""
    work: Counter[KernelWork] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> Json:
        """Return the section as plain values."""
        work = [[each.kind, each.dtype, list(each.extents), count] for each, count in self.work.items()]
        return {**asdict(replace(self, work=Counter(), host=Counter())), "work": work, "host": dict(self.host)}

    @classmethod
    def from_json(cls, data: Json) -> StreamWork:
        """Make a section from the result of ``as_json``."""
        work = {KernelWork(kind, dtype, tuple(extents)): count for kind, dtype, extents, count in data["work"]}
        return cls(**{**data, "work": Counter(work), "host": Counter(data["host"])})
