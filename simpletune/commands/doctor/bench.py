"""``doctor --bench``: eight short runs on any card within ten minutes, and a file of their figures to send in.

The file says nothing of the user: its texts are the card's name and versions, and everything in it is printed first.
Runs take real models with random weights, each in a budget of its own; what is measured is in the file at once.
Imports no torch.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from simpletune import __version__
from simpletune.commands.doctor.checks import DRIVER, in_wsl
from simpletune.commands.doctor.machine import Machine
from simpletune.commands.doctor.probe import ProbeProcess
from simpletune.estimate.timing.speeds import HostSpeeds
from simpletune.system import strict_json
from simpletune.system.atomic import write_json
from simpletune.system.console import say
from simpletune.system.environment import LIBRARIES, version_or_none
from simpletune.system.gpus import file_words
from simpletune.system.options import Json, Option, UserError, join_names
from simpletune.system.redact import redact

SECONDS = 600.0  # for everything
RUN_SECONDS = 90.0  # for one run, with its prediction and model; the child is then ended
OF_RUN = 0.7  # of a run's seconds until the child itself takes no further step
COUNT = 8
MAX_BYTES = 2**15

BF16, NF4 = ("precision.weights=bf16",), ("precision.weights=nf4",)
PX512, BATCH4 = ("data.resolution=512",), ("train.batch_size=4",)
STREAMED = ("memory.resident_blocks=0",)
FULL = (
    "adapter.method=full",
    "optimizer.name=adamw8bit",
    "memory.optimizer_in_backward=true",
    "train.clip=per_parameter",
    "train.gradient_accumulation=1",
)
# Overrides of sd3_medium_lora_r16_int8, the most informative first. The first eight that the card has room for run, so
# the last ones stand in for larger ones. A run whose overrides change gets another name: files keep the figures.
RUNS: dict[str, tuple[str, ...]] = {
    "LoRA int8, 1024 px": (),
    "LoRA nf4, 512 px": (*NF4, *PX512),
    "LoRA bf16, 1024 px": BF16,
    "LoRA int8, streamed, 512 px": (*STREAMED, *PX512),
    "SD 1.5 LoRA bf16, 512 px": ("model.family=sd15", "adapter.rank=8", *BF16, *PX512),
    "full bf16, 512 px": (*FULL, *BF16, *PX512),
    "LoRA bf16, 512 px, batch 4": (*BF16, *PX512, *BATCH4),
    "LoRA bf16, 1024 px, batch 4": (*BF16, *BATCH4),
    "LoRA int8, 512 px, no checkpointing": (*PX512, "memory.checkpointing=none"),
    "LoRA int8, 512 px": PX512,
    "LoRA nf4, streamed, 512 px": (*NF4, *STREAMED, *PX512),
}
LeftOut = Literal["does not fit", "not supported", "out of memory", "out of time", "failed"]
FINAL = ("does not fit", "not supported")  # a second call tries the others again

Positive = Annotated[float, Field(gt=0, lt=1e9)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9.+_-]{1,40}$")]  # a version; no text that a page would interpret
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9 .,()@/+_-]{1,80}$")]


class Run(Option):
    """One run; without ``seconds`` it says why."""

    name: Name
    predicted_mib: Positive | None = None
    measured_mib: Positive | None = None
    """Peak of what was allocated on the card; null on a processor."""
    predicted_seconds: Positive | None = None
    """Of a step, by the card's data sheet and ``host``; null on a processor."""
    seconds: Positive | None = None
    """The median of ``steps`` steps."""
    least: Positive | None = None
    """The least of them."""
    host: HostSpeeds | None = None
    """The machine before the steps."""
    host_after: HostSpeeds | None = None
    """The machine after them: other programs disturbed a run whose figures differ."""
    steps: Annotated[int, Field(gt=0, lt=1000)] | None = None
    left_out: LeftOut | None = None


class CardFile(Option):
    """The figures of one card."""

    version: Literal[1]
    card: Name
    """CUDA's name, or the processor's."""
    capability: Annotated[list[Annotated[int, Field(ge=0, lt=100)]], Field(min_length=2, max_length=2)] | None = None
    """CUDA compute capability; null on a processor."""
    memory_bytes: Annotated[int, Field(gt=0, lt=2**50)] | None = None
    """That torch reports; null on a processor."""
    driver: Word | None = None
    cuda: Word | None = None
    system: Literal["Linux", "WSL", "other"]
    core: Positive
    """Seconds of a fixed loop on one core of the processor (``host_probes.core_seconds``); of runs without ``host``."""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    versions: Annotated[dict[Word, Word], Field(max_length=20)]
    runs: Annotated[list[Run], Field(max_length=40)] = []

    @property
    def file_name(self) -> str:
        """``t4-15gib.json``: cards of one name differ in memory."""
        size = f"-{self.memory_bytes / 2**30:.0f}gib" if self.memory_bytes else ""
        return f"{file_words(self.card)}{size}{'-wsl' if self.system == 'WSL' else ''}.json"

    def is_same_machine(self, other: CardFile) -> bool:
        """Return whether both are of one machine and its versions, as far as a file says."""
        without = {"core", "date", "runs"}
        return self.model_dump(exclude=without) == other.model_dump(exclude=without)


def read_card_file(file: Path) -> CardFile:
    """Read a file of figures. Raises UserError if it cannot be read, or is none of this version."""
    try:
        return CardFile.model_validate(strict_json.read(file, MAX_BYTES))
    except (OSError, strict_json.JsonError, ValidationError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(f"{file}: not a file of simpletune doctor --bench ({reason})") from None


def bench(where: str, out: Path | None) -> None:
    """Measure on this machine's card (``cuda``), or try the form with the tiny model (``cpu``); write the file ``out``,
    or one in the current folder that is named after the card."""
    probe = ProbeProcess()
    try:
        measure_runs(Machine(probe), where, out)
    finally:
        probe.close()


def measure_runs(machine: Machine, where: str, out: Path | None, seconds: float = SECONDS) -> Path:
    """Take the runs, and write the file after each; a file that exists is continued. Raises UserError if there is no
    card, the file is another machine's, or no run could be measured."""
    deadline = time.monotonic() + seconds
    card = describe(machine, where)
    file = out or Path(card.file_name)
    if file.exists():
        earlier = read_card_file(file)
        if not earlier.is_same_machine(card):
            raise UserError(f"{file} is of another card or other versions. Name another file with --out")
        kept = [run for run in earlier.runs if run.seconds or run.left_out in FINAL]
        card = earlier.model_copy(update={"runs": kept})
    say(f"bench   {COUNT} short runs on {card.card}, {seconds / 60:.0f} min at most. {file} gets this, and no more:")
    if where == "cpu":
        say("bench   on a processor, every run takes the tiny model at 64 px; its figures are no card's")
    say(json.dumps(card.model_dump(mode="json", exclude_none=True), indent=2))
    write_json(file, card.model_dump(mode="json", exclude_none=True))
    for name in RUNS:
        if sum(run.seconds is not None for run in card.runs) == COUNT:
            break
        if any(run.name == name for run in card.runs):
            continue
        run = take_run(machine, name, where, deadline)
        say(json.dumps(run.model_dump(mode="json", exclude_none=True)))
        card = card.model_copy(update={"runs": [*card.runs, run]})
        write_json(file, card.model_dump(mode="json", exclude_none=True))
    left_out = [f"{run.name} ({run.left_out})" for run in card.runs if run.left_out]
    count = sum(run.seconds is not None for run in card.runs)
    if not count:
        raise UserError(f"doctor --bench: no run was measured: {join_names(left_out)}. simpletune doctor says more", 1)
    if left_out:
        say(f"bench   left out: {join_names(left_out, len(left_out))}")
    say(f"bench   {file}: {count} of {COUNT} runs, all as printed above")
    return file


def describe(machine: Machine, where: str) -> CardFile:
    """Describe the machine for a file: nothing of its user, folders or network. Raises UserError if torch finds no
    card, or cannot be asked."""
    torch, host = machine.ask("torch"), machine.ask("host")
    for answer in (torch, host):
        if "error" in answer:
            raise UserError(f"doctor --bench: {redact(answer['error'])}. simpletune doctor says more", 1)
    cuda = where == "cuda"
    if cuda and not torch["devices"]:
        raise UserError(
            "doctor --bench: torch finds no CUDA device; simpletune doctor says why. To try the form "
            "with the tiny model on the processor: simpletune doctor --bench cpu"
        )
    device: Json = torch["devices"][0] if cuda else {}
    code, said = (cuda and machine.command(*DRIVER)) or (1, "")
    driver = re.match(r"\d[\d.]{0,39}(?=,)", said) if code == 0 else None
    versions = [(name, version_or_none(name)) for name in (*LIBRARIES, "triton")]
    return CardFile(
        version=1,
        card=printable_name(device["name"] if cuda else host["processor"]),
        capability=list(device["capability"]) if cuda else None,
        memory_bytes=int(device["total"]) if cuda else None,
        driver=driver[0] if driver else None,
        cuda=torch["cuda"] if cuda else None,
        system="WSL" if in_wsl(machine) else "Linux" if machine.system[0] == "Linux" else "other",
        core=float(f"{host['core']:.3g}"),
        date=datetime.date.today().isoformat(),
        versions={"simpletune": __version__} | {name: found for name, found in versions if found},
    )


def printable_name(name: str) -> str:
    """Return a device's name in the characters that a file may have; processors' have (R), (TM) and more."""
    return re.sub(r"[^A-Za-z0-9 .,()@/+_-]", " ", name)[:80].strip() or "unknown"


def take_run(machine: Machine, name: str, where: str, deadline: float) -> Run:
    """Ask the child for one run, within its budget and the deadline; whatever becomes of it is a run of the file."""
    began = time.monotonic()
    limit = min(RUN_SECONDS, deadline - began)
    if limit <= 0:
        return Run(name=name, left_out="out of time")
    machine.probe.seconds = limit
    answer = machine.ask(f"bench {json.dumps([RUNS[name], where, OF_RUN * limit])}")
    if "error" in answer:
        is_late = time.monotonic() - began >= limit
        say(f"bench   {name}: {redact(answer['error'])}")  # on the screen only: it may name folders
        return Run(name=name, left_out="out of time" if is_late else "failed")
    return Run(name=name, **answer)
