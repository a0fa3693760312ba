"""``python -m benchmarks.first_hour``: test and measure on a card for 30 minutes, the most informative part first.

Named stages run one after another, each in its own process with a time budget and a log. A stage that fails, hangs
or is killed does not end the hour. ``stages.json`` and ``stages.md`` are written before and after every stage; a second
call repeats only what has not succeeded. Results go to ``benchmarks/results/gpu-CARD``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import memory, speed_rows
from simpletune.apps.cli.arguments import positive
from simpletune.system.atomic import write_json
from simpletune.system.gpus import file_words
from simpletune.system.options import plural

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks/results")
PATIENCE = 20.0  # seconds from SIGINT, on which pytest still prints its summary, to SIGKILL
OK, RUNNING, OUT_OF_TIME = "ok", "running", "out of time"
WORK = ".cache/first-hour"
SMOKE = (
    "device=cuda", "train.steps=20", "checkpoint.every=10", "validation.every=null",
    f"output.runs={WORK}/runs", f"output.cache={WORK}/cache", f"output.profiles={WORK}/profiles",
)  # fmt: skip
SPEED = (
    "diffusers, LoRA, 1024 px", "LoRA bf16, 1024 px", "LoRA int8, 1024 px", "LoRA int8 products, 1024 px",
    "LoRA int8 products, int8 input gradient, 1024 px",
)  # fmt: skip
FULL = ("full bf16, adamw8bit in backward, 1024 px", "full bf16, adamw8bit in backward, streamed, 1024 px")


@dataclass(frozen=True)
class Stage:
    """One command of the hour.

    Args:
        name: of the stage and, with dashes, of its log.
        command: words; run in the project's folder.
        seconds: budget.
        fills: part of the rest, which runs while time is left.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    fills: bool = False

    @property
    def log(self) -> str:
        """Path of the log, relative to the results."""
        return f"logs/{self.name.replace(' ', '-')}.log"

    def shown(self) -> str:
        """The command without this machine's paths."""
        words = [word if re.fullmatch(r"[\w./=:-]+", word) else f"'{word}'" for word in self.command]
        return " ".join(words).replace(sys.executable, "python").replace(f"{ROOT}/", "")


def hour(out: Path) -> list[Stage]:
    """List the stages: smoke runs, targets, kernels, speed, streaming, tests, then the rest of the grids.

    Args:
        out: folder of the results.
    """
    python = sys.executable
    train = (python, "-m", "simpletune", "train", "configs/demo.json", *SMOKE)
    flash = (*train, "name=first-hour-flash", "precision.compute=bf16", "speed.attention=flash")
    tune = (python, "-m", "simpletune", "doctor", "--calibrate", str(speed_rows.CONFIG), *speed_rows.INPUT_GRADIENT)
    grids = (python, "-m", "benchmarks")
    measured = (*grids, "memory", "--out", str(out), "--measure-only", "--minutes")
    speed = (*grids, "speed", "--out", str(out), "--device", "cuda", "--minutes")
    targets = "; ".join(name for name, row in memory.ROWS.items() if row.target_mib and not row.whole)
    tests = (python, "-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu", "-k")
    first = "int8 or stream"
    return [
        Stage("doctor", (python, "-m", "simpletune", "doctor", "--out", str(out / "doctor.txt")), 120),
        Stage("smoke", (*train, "name=first-hour"), 90),
        Stage("smoke again", (*train, "name=first-hour"), 60),  # finds text and latents in the cache
        Stage("smoke resumed", (*train, "name=first-hour", "train.steps=30", "--resume", "latest"), 60),
        Stage("smoke flash", flash, 60),  # draws with another attention kernel than the default
        Stage("memory targets", (*measured, "3", "--rows", targets), 210),
        Stage("tune kernels", tune, 150),  # compiles every tile, which would eat the budget of speed
        Stage("speed 1024 px", (*speed, "3", "--rows", "; ".join(SPEED)), 210),
        Stage("full and streamed", (*speed, "3", "--rows", "; ".join(FULL)), 210),
        Stage("tests int8 and streaming", (*tests, first), 300),
        Stage("tests", (*tests, f"not ({first})"), 330),
        Stage("memory", (*measured, "8"), 520, fills=True),
        Stage("speed", (*speed, "20"), 1260, fills=True),
    ]


def run(stages: Sequence[Stage], folder: Path, minutes: float, card: str = "", again: bool = False) -> int:
    """Run the stages that have not succeeded yet, even if one fails, and record each.

    Args:
        stages: in order.
        folder: of the results; created.
        minutes: for all of them; a stage that would begin later is recorded as not started.
        card: name of the device, for the record.
        again: also repeat stages that succeeded.

    Returns:
        0 if every stage has succeeded, else 1.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    record = Record(folder, card)
    deadline = time.monotonic() + 60 * minutes
    for number, stage in enumerate(stages, 1):
        if not again and record.outcome(stage) == OK:
            tell(f"[{number}/{len(stages)}] {stage.name}: already {OK}")
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            record.put(stage, outcome="not started: no time left")
            continue
        limit = min(stage.seconds, left)
        tell(f"[{number}/{len(stages)}] {stage.name}: at most {limit:.0f} s")
        outcome, seconds = run_one(stage, folder, limit, record)
        tell(f"      {outcome} after {seconds:.1f} s" + ("" if outcome == OK else f": {last_line(folder / stage.log)}"))
    failed = [stage.name for stage in stages if record.outcome(stage) != OK]
    tell(f"{plural(len(stages) - len(failed), 'stage')} of {len(stages)} ok. Results: {folder}")
    if failed:
        tell(f"not ok: {', '.join(failed)}. The same command repeats these alone")
    return 1 if failed else 0


def run_one(stage: Stage, folder: Path, limit: float, record: Record) -> tuple[str, float]:
    """Run one stage in its own process group, and end the whole group.

    Returns:
        The outcome, and seconds.

    Raises:
        KeyboardInterrupt: a signal ended the hour; the stage is recorded as stopped.
    """
    began, outcome = time.monotonic(), "stopped"
    with (folder / stage.log).open("w", encoding="utf-8") as log:
        log.write(f"$ {stage.shown()}\n")
        log.flush()
        try:
            process = subprocess.Popen(
                stage.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            record.put(stage, outcome=f"not started: {error.strerror}")
            return f"not started: {error.strerror}", 0.0
        try:
            with ended(process):
                record.put(stage, outcome=RUNNING, pid=process.pid, command=stage.shown())
                code = process.wait(timeout=limit)
            outcome = OK if code == 0 else fate(code)
        except subprocess.TimeoutExpired:
            outcome = OUT_OF_TIME
        finally:
            seconds = time.monotonic() - began
            record.put(stage, outcome=outcome, pid=process.pid, command=stage.shown(), seconds=round(seconds, 1))
    return outcome, seconds


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End a process and its children after this context: SIGINT if it still runs, then SIGKILL to its group."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=PATIENCE)
        with suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def fate(code: int) -> str:
    """Describe an exit code; a negative one is a signal's number."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line[:200] for line in reversed(lines) if line), "")


class Record:
    """What became of each stage, on disk after every change.

    Args:
        folder: of ``stages.json`` and ``stages.md``.
        card: name of the device.
    """

    def __init__(self, folder: Path, card: str):
        self.folder, self.card = folder, card
        file = folder / "stages.json"
        before = json.loads(file.read_text(encoding="utf-8"))["stages"] if file.exists() else []
        self.stages: dict[str, dict[str, Any]] = {each["name"]: each for each in before}

    def outcome(self, stage: Stage) -> str | None:
        """The recorded outcome of a stage; None: it has not been reached."""
        return self.stages.get(stage.name, {}).get("outcome")

    def put(self, stage: Stage, **found: object) -> None:
        """Record a stage, and write both files."""
        self.stages[stage.name] = {"name": stage.name, "budget": stage.seconds, "log": stage.log, **found}
        write_json(self.folder / "stages.json", {"card": self.card, "stages": list(self.stages.values())})
        lines = ["# The first hour on this card", "", f"Card: {self.card}. `make gpu` writes this page.", ""]
        lines += ["| stage | command | seconds | budget | outcome | log |", "|---|---|---|---|---|---|"]
        for each in self.stages.values():
            command, seconds, budget = each.get("command", ""), each.get("seconds", ""), f"{each['budget']:.0f}"
            cells = (each["name"], f"`{command}`", str(seconds), budget, each["outcome"], each["log"])
            lines.append(f"| {' | '.join(cells)} |")
        (self.folder / "stages.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def card_name() -> str | None:
    """CUDA's name of the device that torch would use, found in a child process; None without one."""
    code = "import torch; print(torch.cuda.get_device_name())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else None


def folder_of(card: str) -> Path:
    """Folder of a card's results: ``NVIDIA L4`` -> ``gpu-l4``."""
    return RESULTS / f"gpu-{file_words(card)}"


def tell(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the hour, or with ``--dry-run`` print its order and budgets.

    Returns:
        0 if every stage succeeded, 1 if not, 3 without a card, 130 after a signal.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_hour", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"default: {RESULTS}/gpu-CARD")
    parser.add_argument("--minutes", type=positive, default=30, help="for all stages (default: 30)")
    parser.add_argument("--again", action="store_true", help="repeat the stages that succeeded, too")
    parser.add_argument("--dry-run", action="store_true", help="print order and budgets, and start nothing")
    args = parser.parse_args(argv)
    if args.dry_run:
        for stage in hour(args.out or folder_of("CARD")):
            tell(f"{stage.name:<26}{stage.seconds:>5.0f} s  {stage.shown()}")
        return 0
    card = card_name()
    if card is None:
        print("error: torch finds no CUDA device. simpletune doctor says why", file=sys.stderr)
        return 3
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = args.out or folder_of(card)
    try:
        return run(hour(out), ROOT / out, args.minutes, card, args.again)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
