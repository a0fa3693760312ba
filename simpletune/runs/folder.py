"""Open a run's folder, new or to resume, and read and write its metrics and summary."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import NoneType
from typing import ClassVar

from simpletune.config.schema import ResolvedConfig, TrainConfig, profile_folder, run_folder
from simpletune.runs.checkpoint_folders import list_checkpoints, rewind
from simpletune.runs.repair import NUMBER, parse_row, read_own, read_own_rows, row_key, set_aside
from simpletune.system.atomic import remove, write_json, write_text
from simpletune.system.checksums import with_sum, without_sum
from simpletune.system.console import say
from simpletune.system.disk import room_for
from simpletune.system.options import Json, UserError, join_names, plural


class RunFile(str):
    """Name of a file or folder that a run writes into its folder."""

    known: ClassVar[list[RunFile]] = []
    first: bool  # may be written before the first checkpoint
    file: bool  # a file that a run overwrites; a folder in its place is set aside
    rows: tuple[str, ...]  # numbers in each row of a JSON Lines file that a resumed run cuts back

    def __new__(cls, name: str, *, first: bool = False, file: bool = False, rows: tuple[str, ...] = ()) -> RunFile:
        made = super().__new__(cls, name)
        made.first, made.file, made.rows = first, file, rows
        cls.known.append(made)
        return made


METRICS = RunFile("metrics.jsonl", first=True, file=True, rows=("step", "loss"))
SUMMARY = RunFile("summary.json", file=True)
CONFIG = RunFile("config.json", first=True, file=True)
EVALUATION = RunFile("eval_before.json", first=True, file=True)
EVALUATIONS = RunFile("evaluations.jsonl", first=True, file=True, rows=("step", "eval_loss"))
ENVIRONMENT = RunFile("environment.json", first=True, file=True)
DATA = RunFile("data.json", first=True, file=True)
SKIPPED = RunFile("skipped.jsonl", first=True, file=True, rows=("step",))
CHOSEN = RunFile("chosen.json", first=True, file=True)
PARENT = RunFile("parent.json", first=True, file=True)
STACK = RunFile("stack.json", first=True, file=True)
ATTEMPTS = RunFile("attempts.json", first=True, file=True)
OVERFLOWS = RunFile("overflows.jsonl", first=True, file=True, rows=("step",))
DRIFT = RunFile("base_predictions.safetensors", first=True, file=True)
PREDICTED = RunFile("predicted.json", first=True, file=True)  # steps; memory, time and price before the first one
BEST = RunFile("best.json", file=True)
CONTROL = RunFile("control.json", first=True)
CONTROL_ANSWERS = RunFile("control_answers.jsonl", first=True, file=True)
GENERATED = RunFile("drawn", first=True)
PLANNED = RunFile("planned.json", first=True, file=True)  # steps and memory, by earlier versions
REMOTE = RunFile("remote.json", first=True)  # names the stored run that the folder belongs to
SAMPLES = RunFile("samples", first=True)
BASE, START = "base", "start"  # in it: the pictures of the base, and of the LoRA that training begins with
STRENGTHS = (-2, -1, 0, 1, 2)
"""The strengths at which a slider's pictures are drawn: 0 gives the base's, 1 those of the step."""
CHECKPOINTS = RunFile("checkpoints")
SCORES = RunFile("evaluation.json")
for _name in ("README.md", "report.html", "report.md", "pytorch_lora_weights.safetensors"):
    RunFile(_name, file=True)
RunFile("wandb", first=True)  # its own copy
NEEDED = {each: each.rows for each in RunFile.known if each.rows}

OLD_SAMPLES = 16  # of an evaluation, before per-sample losses were recorded
LEFT_OVER = re.compile(r"^\..*\.part$")


def pictures_at(samples: Path, step: int, strength: int) -> Path:
    """Return the folder of a slider's validation pictures, below that of all of them, at one of ``STRENGTHS``."""
    if not strength:
        return samples / BASE
    state = samples / f"step-{step:06d}"
    return state if strength == 1 else state / f"strength{strength:+d}"


def open_fresh(config: TrainConfig) -> Path:
    """Create the run's folder; move an older one to NAME.1, NAME.2, ..."""
    folder, traces = run_folder(config), profile_folder(config)
    if folder.exists() and any(entry.name != ATTEMPTS for entry in folder.iterdir()):
        # A kill between the two moves leaves only traces under a number.
        taken = (folder, traces) if traces.exists() else (folder,)
        number = next(n for n in count(1) if not any(each.with_name(f"{each.name}.{n}").exists() for each in taken))
        aside = folder.with_name(f"{folder.name}.{number}")
        if traces.exists():
            os.replace(traces, traces.with_name(f"{traces.name}.{number}"))
        os.replace(folder, aside)
        say(f"moved the older run in {folder} to {aside}")
        checkpoints = list_checkpoints(aside)
        if checkpoints and not (aside / SUMMARY).exists():
            say(
                f"  it was unfinished (last checkpoint: step {checkpoints[-1][0]}). To continue it instead, stop this "
                f"run, move it back to {folder}, and use --resume latest"
            )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def clear_unsaved(config: TrainConfig) -> None:
    """Remove the files of a run that was stopped before its first checkpoint, so that a new start replaces it.

    Leaves a folder alone if it contains a checkpoint under any name, a result, or anything that no run writes. Keeps
    the record of attempts, because their time counts for this run.
    """
    folder, traces = run_folder(config), profile_folder(config)
    if not folder.is_dir():
        return
    unsaved = {each for each in RunFile.known if each.first} | {CHECKPOINTS}
    gone = [traces]
    for entry in folder.iterdir():
        if entry.name == CHECKPOINTS and entry.is_dir():
            if any(not LEFT_OVER.match(saved.name) for saved in entry.iterdir()):
                return
        elif entry.name not in unsaved and not LEFT_OVER.match(entry.name) and not entry.name.endswith("lock"):
            return
        if entry.name != ATTEMPTS and not entry.name.endswith("lock"):
            gone.append(entry)
    for entry in gone:
        remove(entry)


def read_summary(folder: Path) -> Json | None:
    """Read the summary of a run; None if it is missing or damaged."""
    return read_own(folder / SUMMARY, {"steps": (int,), "steps_per_epoch": (int,), "output": (str,)})


def earlier_validation_samples(folder: Path) -> int | None:
    """Return the number of samples in a run's evaluations; None if it has made none."""
    rows = list(read_rows(folder / EVALUATIONS))
    return len(rows[-1].get("eval_losses", [])) or OLD_SAMPLES if rows else None


def finished_steps(folder: Path) -> int | None:
    """Return the steps of a run that is finished, including card and report; None if it is unfinished."""
    summary = read_summary(folder)
    return summary["steps"] if summary and summary.get("complete") else None


def open_again(config: TrainConfig, step: int, best: Callable[[Path], int | None]) -> Path:
    """Open the folder of a run to resume from a checkpoint: drop metrics of steps to repeat, and set damaged files
    aside. ``best`` finds the step of a run's best checkpoint, which stays.
    """
    folder = run_folder(config)
    if not folder.is_dir():
        raise UserError(f"--resume: {folder} does not exist. Check name, or start without --resume")
    rows = {name: read_own_rows(folder / name, needed) for name, needed in NEEDED.items()}
    there = {row["step"] for name in (METRICS, SKIPPED, OVERFLOWS) for row in rows[name]}
    if missing := [str(number) for number in range(1, step + 1) if number not in there]:
        say(
            f"warning {folder / METRICS} lacks {len(missing)} of the steps 1-{step}: {join_names(missing, 6)}. The "
            "loss curve has a gap; the weights are not affected"
        )
    for name in [each for each in RunFile.known if each.file] + [SAMPLES, CHECKPOINTS]:
        place = folder / name
        if os.path.lexists(place) and not (place.is_file() if name.file else place.is_dir()):
            set_aside(place, f"is not {'a file' if name.file else 'a folder'}")
    for name in NEEDED:
        file = folder / name
        if not file.exists() and name != METRICS:  # most runs skip no step, and some evaluate nothing
            continue
        kept = [row for row in rows[name] if row["step"] <= step]
        write_text(file, "".join(json.dumps(row) + "\n" for row in kept))
    if early := (read_json_or_none(folder / SUMMARY) or {}).get("status"):
        remove(folder / SUMMARY)
        say(f"resume  the run was {early}; that result stays until the run ends")
    for later in rewind(folder, step, config.checkpoint, best):
        say(f"  renamed a checkpoint later than step {step} to {later}; delete it if you do not need it")
    for entry in folder.glob(".*.part"):
        remove(entry)
    for entry in (folder / SAMPLES).glob("step-*"):
        number = entry.name[5:]
        if number.isdecimal() and int(number) > step:
            remove(entry)
    return folder


def read_metrics(folder: Path) -> list[Json]:
    """Read the rows of metrics.jsonl; skip a partial last line."""
    return list(read_rows(folder / METRICS))


def read_rows(file: Path) -> Iterator[Json]:
    """Yield the rows of a JSON Lines file; skip a partial last line.

    Raises:
        UserError: another line is damaged.
    """
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    for number, line in enumerate(lines, 1):
        row = parse_row(line, NEEDED[EVALUATIONS] if file.name == EVALUATIONS else ("step",))
        if row is not None:
            yield row
        elif number != len(lines):
            raise UserError(f"{file}: line {number} is damaged. train CONFIG --resume latest sets it aside")


def append_metrics(folder: Path, row: Json, name: str = METRICS) -> None:
    """Append one line to metrics.jsonl or a similar file, visible to readers at once; a full disk changes nothing."""
    file = folder / name
    size = file.stat().st_size if file.exists() else 0
    with room_for(f"writing {name}", folder, undo=lambda: os.truncate(file, size) if file.exists() else None):
        with open(file, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")


def record_validation(folder: Path, row: Json) -> None:
    """Record an evaluation, replacing one of the same weights: a resumed run may evaluate a step again."""
    others = [json.dumps(old) for old in read_rows(folder / EVALUATIONS) if row_key(old) != row_key(row)]
    write_text(folder / EVALUATIONS, "\n".join([*others, json.dumps(row)]) + "\n")


def put_chosen(config: ResolvedConfig, chosen: TrainConfig, threads: int) -> None:
    """Record the values chosen for ``auto``, for the run's next start; ``chosen`` has ``memory`` resolved."""
    found: Json = {"threads": threads}
    if config.memory.checkpointing == "auto":
        blocks = config.model.architecture.blocks()
        memory = chosen.memory
        found |= {"checkpointed": memory.checkpointed_count(blocks), "blocks": blocks}
        found["keeping_attention"] = memory.keeping_count(blocks)
    if config.memory.modulation == "auto":
        found["modulation"] = chosen.memory.modulation
    write_text(run_folder(config) / CHOSEN, json.dumps(with_sum(found)) + "\n")


def read_chosen(config: ResolvedConfig) -> Json:
    """Read the valid choices of the run's last start: threads, blocks that checkpoint and keep attention,
    modulation."""
    saved = read_own(run_folder(config) / CHOSEN, {}) or {}
    types = {"threads": int, "checkpointed": int, "keeping_attention": int, "modulation": str}
    sound = {key: saved[key] for key, kind in types.items() if type(saved.get(key)) is kind}
    blocks = config.model.architecture.blocks()
    largest = {"threads": 1024, "checkpointed": blocks, "keeping_attention": blocks}
    return sound | {key: min(max(sound[key], 0), most) for key, most in largest.items() if key in sound}


LORA_RECORD = {"name": (str,), "sha256": (str,), "steps": (int, NoneType), "scale": (float,)}


def read_parent(folder: Path) -> Json | None:
    """Read what ``adapter.start`` was when a run began: name, SHA-256, steps or None, and scale; None without."""
    return read_own(folder / PARENT, LORA_RECORD)


def read_stacked(folder: Path) -> list[Json]:
    """Read what ``model.loras`` was when a run began, each as for ``read_parent``; empty without."""
    found = read_own(folder / STACK, {"loras": (list,)}) or {"loras": []}
    for row in found["loras"]:
        if not isinstance(row, dict) or any(type(row.get(key)) not in of for key, of in LORA_RECORD.items()):
            set_aside(folder / STACK, "is damaged")
            return []
    return list(found["loras"])


def put_predicted(folder: Path, steps: int, steps_per_epoch: int, memory: object, time: Json | None) -> None:
    """Record the planned steps and what is predicted of them: memory by stage, and ``JobTime.as_json``. A resumed run,
    whose ``time`` is None, keeps the time of its first start, which covers its whole length."""
    planned = {"steps": steps, "steps_per_epoch": steps_per_epoch, "memory": memory}
    write_json(folder / PREDICTED, planned | {"time": time or predicted_time(folder)})
    remove(folder / PLANNED)


def predicted_time(folder: Path) -> Json | None:
    """Read the time and price predicted when a run started (``JobTime.as_json``); None without a prediction."""
    found = read_own(folder / PREDICTED, {"steps": (int,)}) or {}
    time = found.get("time", found)  # earlier versions wrote nothing else into the file
    if not time:
        return None
    needed = {"seconds_per_step": NUMBER, "seconds_by_stage": (dict,), "steps": (int,)}
    if not isinstance(time, dict) or any(type(time.get(key)) not in types for key, types in needed.items()):
        set_aside(folder / PREDICTED, "is damaged")
        return None
    return time


def newest_run(runs: Path) -> Path:
    """Return the run that finished last."""
    found = []
    for file in runs.glob(f"*/{SUMMARY}"):
        with suppress(FileNotFoundError):  # its run has just been continued
            found.append((file.stat().st_mtime, file))
    if not found:
        saved = [(run, list_checkpoints(run)) for run in sorted(runs.glob("*/"))]
        names = [f"{run}@{checkpoints[-1][0]}" for run, checkpoints in saved if checkpoints]
        remedy = f"Name a stopped run: --run {join_names(names, 4)}" if names else "Train one first: ./train.sh"
        raise UserError(f"{runs}/ contains no finished run. {remedy}")
    return max(found)[1].parent


def read_json_or_none(file: Path) -> Json | None:
    """Read a JSON object from a file; None if the file does not exist. Raises UserError if it is damaged."""
    try:
        value: Json = json.loads(file.read_text(encoding="utf-8"))
        value = without_sum(value) if isinstance(value, dict) else value
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({error}). Remove it; the run writes it again") from None
    return value


def read_scores(folder: Path) -> Json | None:
    """Read what ``simpletune evaluate`` measured for a run; None if it has not been evaluated."""
    return read_json_or_none(folder / SCORES)


def overflow_words(summary: Json) -> str:
    """Describe the steps undone because of fp16, and the blocks that compute in fp32; empty if there are none."""
    steps, blocks = summary.get("overflow_steps", 0), summary.get("fp32_blocks", [])
    wide = f", {plural(len(blocks), 'block')} in fp32 since ({', '.join(map(str, blocks))})" if blocks else ""
    return f"{plural(steps, 'step')} undone{wide}" if steps else ""
