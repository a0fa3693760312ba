"""``simpletune finish``: a result of what a stopped run has saved, without training and without its pictures."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch

from simpletune.config.resolve import resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.options import UserError
from simpletune.runs import checkpoint
from simpletune.runs.checkpoint_folders import checkpoint_folder, list_checkpoints
from simpletune.runs.folder import SUMMARY, finished_steps, read_json_or_none
from simpletune.runs.model_card import shareable, write_card
from simpletune.runs.names import RunName, find_in_run, find_run, run_config
from simpletune.runs.summary import summary_at
from simpletune.runs.weights import overwrite
from simpletune.system.atomic import write_json
from simpletune.system.console import say
from simpletune.system.disk import room_for
from simpletune.system.locks import exclusive
from simpletune.system.safetensors_file import WeightReader, write_safetensors
from simpletune.training.finish import report_or_warning

CPU = torch.device("cpu")


def finish_early(name: str) -> Path:
    """Leave what a finished run leaves, as far as it is known, from one of a run's checkpoints.

    Args:
        name: ``RUN``: of its newest checkpoint that is whole; or ``RUN@STEP``.

    Returns:
        The result.

    Raises:
        UserError: there is no such run or checkpoint, it is finished already, or another process trains it.
    """
    named = find_run(name)
    run, config = named.folder, run_config(named.folder)
    with exclusive(run, "with Ctrl-C: it saves first"), room_for("writing the result", run):
        refuse_finished(named)
        saved = read_intact(named)
        summary, warnings = summary_at(run, resolve_model_folder(config), saved), list[str]()
        output = export(run, config, saved)
        summary |= {"output": str(output), "warnings": warnings}
        write_json(run / SUMMARY, summary | {"complete": False})
        card = write_card(run, config, summary, saved.manifest)
        page = report_or_warning(run, warnings.append) if config.output.report else None
        write_json(run / SUMMARY, summary | {"complete": True})
    for warning in warnings:
        say(f"warning {warning}")
    print_finished(named, summary, {"result": output, "model card": card, "report": page})
    return output


def refuse_finished(named: RunName) -> None:
    """A finished run has its result; one that was finished early may get another checkpoint's.

    Raises:
        UserError: it is finished, and nothing was saved since.
    """
    run, step = named
    steps, found = finished_steps(run), list_checkpoints(run)
    if steps is None or (found and found[-1][0] > steps):
        return
    early = (read_json_or_none(run / SUMMARY) or {}).get("status")
    if early and step not in (None, steps):
        return
    result = find_in_run(RunName(run))
    others = ", ".join(f"{run}@{number}" for number, _ in found if number != steps)
    hint = f" Other checkpoints have names of their own: {others}" if others else ""
    how = early or f"{steps} steps"
    raise UserError(f"{run} is done already ({how}). Its result: {result.lora or result.transformer}.{hint}")


def read_intact(named: RunName) -> checkpoint.SavedState:
    """The checkpoint that was named, or the newest that is whole.

    Raises:
        UserError: it is damaged, or there is none.
    """
    run, step = named
    if step is not None:
        return _read(checkpoint_folder(run, step))
    found = list_checkpoints(run)
    for _, folder in reversed(found):
        try:
            return _read(folder)
        except UserError as error:
            say(f"{error}: left out")
    reason = f"all {len(found)} checkpoints of it are damaged" if found else "it has no checkpoint"
    raise UserError(f"{run} cannot be finished: {reason}. Train it on until it saves")


def _read(folder: Path) -> checkpoint.SavedState:
    """A checkpoint, its checksums compared."""
    try:
        return checkpoint.read(folder)
    except UserError as error:  # its remedies are those of --resume
        raise UserError(str(error).removeprefix("--resume: ").partition(". ")[0]) from None


def export(run: Path, config: TrainConfig, saved: checkpoint.SavedState) -> Path:
    """Write the result as the run's end would have: of the average, where one is kept.

    Args:
        run: its folder.
        config: as the user gave it.
        saved: the checkpoint.
    """
    adapter, metadata = config.adapter, checkpoint.metadata_of(shareable(config), saved.step)
    if adapter.exports_to_checkpoints:  # the same tensors; the header of a result names no local folders
        tensors = WeightReader([saved.folder / adapter.output_name]).get_all()
        return write_safetensors(tensors, run / adapter.output_name, metadata)
    trained = find_in_run(RunName(run, saved.step)).trained
    assert trained is not None
    model = resolve_model_folder(config).model
    transformer = model.load_transformer(config.precision, CPU, config.train.seed)
    overwrite(transformer, trained)
    return adapter.export(transformer, run, metadata)


def print_finished(named: RunName, summary: dict[str, object], places: dict[str, Path | None]) -> None:
    """Say what was made."""
    run = named.folder
    say(f"{run}: {summary.get('status', 'finished')}, without training")
    for what, place in places.items():
        if place is not None:
            say(f"  {what:<12} {place}")
    say(f"  {'figures':<12} {run / SUMMARY}")
    if "status" in summary:
        say(f"  {'draw with it':<12} {shlex.join(['simpletune', 'generate', '--run', str(run)])}")
        say("To train on, from the run's last checkpoint: the command that started it, with --resume latest")
