"""Choose the best checkpoint of a run, and say why. Imports no torch.

By fidelity, as ``simpletune evaluate`` measures it: the highest subject fidelity among the checkpoints whose prompt
fidelity is not significantly below the base's (the 95% interval of the paired differences reaches 0). If all are below,
then among those within two standard errors of the best of them.

Without it the last, since the lowest held-out loss is the worse guide (docs/how-to/best-checkpoint.md). The lowest only
where the last is worse than the base, by more than the standard error of the paired differences, and the lowest is not.
An evaluation is the lowest so far if its loss is lower by more than that error: merely as good is not enough.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from simpletune.config.validation_schedule import standard_error
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.folder import BEST, EVALUATIONS, read_json_or_none, read_rows, read_scores
from simpletune.runs.repair import is_start, row_key
from simpletune.system.atomic import remove, write_text
from simpletune.system.checksums import with_sum
from simpletune.system.options import Json, UserError, join_names, plural

FEWEST = 5
"""Prompts of an evaluation from which on its intervals say what they claim, and checkpoints are chosen by it."""
USER, FIDELITY, HELD_OUT, LAST = "user", "fidelity", "held-out loss", "last"


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint to use; the summary has these fields."""

    step: int
    by: str  # what it was chosen by
    why: str  # the reason, in words
    strength: float = 1.0  # of the LoRA, at which it was chosen

    def describe(self, run: object) -> str:
        """Say what to use of a run, and why."""
        return f"{run}{self.suffix}, {'the last' if self.by == LAST else f'by {self.by}'}: {self.why}"

    @property
    def suffix(self) -> str:
        """The suffix to the run's name that selects it: ``@200`` or ``@200:0.8``."""
        return f"@{self.step}" + (f":{self.strength:g}" if self.strength != 1 else "")


def choose_best(run: Path) -> BestCheckpoint | None:
    """Choose among the checkpoints of a run: the user's choice, else by fidelity, else the last, or the one with the
    lowest held-out loss where only the last is worse than the base; None if the run has no checkpoint."""
    steps = [step for step, _ in list_checkpoints(run)]
    if not steps:
        return None
    if (found := _choose_by_user_or_fidelity(run, steps)) is not None:
        return found
    if (lowest := lowest_held_out(run)) is not None:
        rows = [row for row in held_out_rows(run) if row["step"] in (0, *steps)]
        return _choose_by_held_out_loss(lowest, rows, steps[-1])
    few = _prompts_of(read_scores(run))
    why = (
        "nothing measures which checkpoint is better. Run simpletune evaluate, or set validation.split"
        if not few
        else f"an evaluation with {plural(few, 'prompt')} does not tell which checkpoint is better: it takes {FEWEST}"
    )
    return BestCheckpoint(steps[-1], LAST, why)


def _choose_by_user_or_fidelity(run: Path, steps: list[int]) -> BestCheckpoint | None:
    taken = (read_json_or_none(run / BEST) or {}).get("step")
    if taken is not None and taken in steps:
        return BestCheckpoint(taken, USER, "chosen with simpletune evaluate --choose")
    return choose_by_fidelity(run, steps)


def lowest_held_out(run: Path) -> Json | None:
    """Return the evaluation on held-out pictures with the lowest loss among those of the run's checkpoints; None
    without."""
    steps = [step for step, _ in list_checkpoints(run)]
    return _best_of([row for row in held_out_rows(run) if row["step"] in steps])


def _prompts_of(result: Json | None) -> int:
    """Return the number of prompts of an evaluation; 0 without one."""
    if result is None or not result["points"]:
        return 0
    found = _score(result["points"][0], "subject_fidelity", result["main"]["subject_fidelity"])
    return int(found.get("prompts", FEWEST))  # evaluations before November 2026 do not say


def step_to_keep(run: Path) -> int | None:
    """Return the step of the checkpoint to keep regardless of its age: the best by choice or fidelity, else the one
    with the lowest held-out loss, so that it can still be chosen beside the last; None if the run has neither."""
    if (found := _choose_by_user_or_fidelity(run, [step for step, _ in list_checkpoints(run)])) is not None:
        return found.step
    lowest = lowest_held_out(run)
    return None if lowest is None else int(lowest["step"])


def choose_by_fidelity(run: Path, steps: Sequence[int]) -> BestCheckpoint | None:
    """Choose by the run's evaluation with encoders; None if there is none of at least FEWEST prompts, or if none of its
    checkpoints exists."""
    result = read_scores(run)
    if result is None or _prompts_of(result) < FEWEST:
        return None
    subject, prompt = result["main"]["subject_fidelity"], result["main"]["prompt_fidelity"]
    points = [point for point in result["points"] if point["step"] in steps]
    if not points:
        return None
    faithful = points
    if prompt is not None:  # those whose 95% interval of the prompt fidelity minus the base's reaches 0
        against_base = [_score(point, "prompt_fidelity", prompt)["from_base"] for point in points]
        limits = [each["value"] if each["high"] is None else each["high"] for each in against_base]
        faithful = [point for point, limit in zip(points, limits, strict=True) if limit >= 0]
    able = faithful or most_faithful_models(points, prompt or subject)
    best = max(able, key=lambda point: _score(point, "subject_fidelity", subject)["value"])
    many, likeness = plural(len(points), "model"), _score(best, "subject_fidelity", subject)["value"]
    why = f"of {many}, its pictures are most like yours"
    scores = f"subject fidelity {likeness:.3f} by {subject}"
    if prompt is not None:
        own = _score(best, "prompt_fidelity", prompt)
        scores += f"; prompt fidelity {own['value']:.3f} by {prompt}, {own['from_base']['value']:+.3f} against the base"
        if faithful:
            why = (
                f"{len(able)} of {many} follow prompts as well as the base; of these, its pictures are most like yours"
            )
        else:
            why = (
                f"none of {many} follows prompts as well as the base; of the {len(able)} that come nearest, its "
                "pictures are most like yours"
            )
    why = f"{why} ({scores})"
    return BestCheckpoint(best["step"], FIDELITY, why, best["strength"] if best["strength"] is not None else 1.0)


def most_faithful_models(points: Sequence[Json], encoder: str) -> list[Json]:
    """Return the models whose prompt fidelity is within two standard errors (of the paired differences) of the best
    one's."""
    leader = max(points, key=lambda point: _score(point, "prompt_fidelity", encoder)["value"])
    own = _score(leader, "prompt_fidelity", encoder)["by_prompt"]
    found = []
    for point in points:
        difference, error = paired_difference(_score(point, "prompt_fidelity", encoder)["by_prompt"], own)
        if difference >= -2 * error:
            found.append(point)
    return found


def _score(point: Json, name: str, encoder: str | None) -> Json:
    """Return one model's score: its value, and the limits of its interval."""
    found: Json = point["scores"][name][encoder]
    return found


def held_out_rows(run: Path) -> list[Json]:
    """Return the evaluations on held-out pictures in order of steps, starting with the base's; all have as many
    samples."""
    rows = [row for row in read_rows(run / EVALUATIONS) if row.get("held_out") and row.get("eval_losses")]
    rows.sort(key=row_key)
    return [row for row in rows if len(row["eval_losses"]) == len(rows[0]["eval_losses"])]


def evaluations_since_best(run: Path) -> int:
    """Count the evaluations on held-out pictures since the best one, whether its step was saved or not."""
    rows = held_out_rows(run)
    best = _best_of(rows, first=0)
    return 0 if best is None else sum(row["step"] > best["step"] for row in rows)


def _best_of(rows: Sequence[Json], first: int = 1) -> Json | None:
    """Return the best of evaluations in order of steps: no later one is better. Steps before ``first`` (the base) do
    not count."""
    best: Json | None = None
    for row in rows:
        if row["step"] >= first and (best is None or is_lower(row["eval_losses"], best["eval_losses"])):
            best = row
    return best


def is_lower(losses: Sequence[float], than: Sequence[float]) -> bool:
    """Return whether losses are lower by more than the standard error of their paired differences."""
    difference, error = paired_difference(losses, than)
    return difference < -error


def paired_difference(losses: Sequence[float], than: Sequence[float]) -> tuple[float, float]:
    """Compute the mean of the paired differences of losses, and its standard error, which is 0 for a single sample."""
    differences = [one - other for one, other in zip(losses, than, strict=True)]
    return fmean(differences), standard_error(differences)


def _choose_by_held_out_loss(lowest: Json, rows: Sequence[Json], last_step: int) -> BestCheckpoint:
    """Choose the last checkpoint; or the one with the lowest loss, if that is no worse than the base and the last is.

    Args:
        lowest: the evaluation with the lowest loss.
        rows: those of the checkpoints, and of the base.
        last_step: of the last checkpoint.
    """
    on, base, last = plural(len(lowest["eval_losses"]), "held-out sample"), rows[0], rows[-1]
    if last["step"] != last_step:  # not evaluated, or on other samples
        return BestCheckpoint(last_step, LAST, f"the loss on {on} is lowest at step {lowest['step']}")
    own = f"a loss of {last['eval_loss']:.4f} on {on}"
    if base["step"] == 0 and not is_start(base):
        beside = f"{_difference(last, base)} against the base"
        if not is_lower(base["eval_losses"], last["eval_losses"]):
            own = f"{own}, {beside}"
        elif is_lower(base["eval_losses"], lowest["eval_losses"]):
            own = f"{own}, {beside}: every checkpoint is worse than it"
        else:
            least = f"the lowest, {lowest['eval_loss']:.4f} on {on}"
            why = f"{least}; the last, step {last_step}, is worse than the base: {beside}"
            return BestCheckpoint(lowest["step"], HELD_OUT, why)
    if lowest["step"] == last_step:
        return BestCheckpoint(last_step, LAST, f"{own}; it is the lowest")
    least = f"lowest at step {lowest['step']}, {_difference(lowest, last)} against the last"
    return BestCheckpoint(last_step, LAST, f"{own}; {least}: run simpletune evaluate to compare pictures")


def _difference(row: Json, than: Json) -> str:
    """Compute the difference of two evaluations' losses, with its standard error."""
    return "{:+.4f} ± {:.4f}".format(*paired_difference(row["eval_losses"], than["eval_losses"]))


def put_choice(run: Path, step: int | None) -> None:
    """Record the checkpoint that the user chooses; None: choose by the figures again."""
    steps = [number for number, _ in list_checkpoints(run)]
    if step is None:
        remove(run / BEST)
        return
    if step not in steps:
        have = f"It has {join_names([str(number) for number in steps], 12)}" if steps else "It has none"
        raise UserError(f"--choose {step}: {run} has no checkpoint of this step. {have}")
    write_text(run / BEST, json.dumps(with_sum({"step": step})) + "\n")
