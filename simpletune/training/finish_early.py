"""Export a result from a checkpoint, without training or data: ``simpletune control RUN --finish``, and a result that
was lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from simpletune.config.load import read_saved
from simpletune.config.resolve import resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.runs import checkpoint
from simpletune.runs.checkpoint_folders import checkpoint_folder, list_checkpoints
from simpletune.runs.figure_sums import FIGURES, figure_sums
from simpletune.runs.folder import SUMMARY, finished_steps, read_json_or_none, read_summary
from simpletune.runs.model_card import write_card
from simpletune.runs.repair import set_aside
from simpletune.runs.result import CHECKSUMS, damaged_results, result_checksums, result_files
from simpletune.runs.stack import read_stack
from simpletune.runs.summary import summary_at
from simpletune.runs.weights import overwrite
from simpletune.runs.weights_names import CheckpointRef, find_in_run, find_run, is_unfinished, run_config
from simpletune.system.atomic import write_json
from simpletune.system.console import say
from simpletune.system.disk import room_for
from simpletune.system.locks import exclusive
from simpletune.system.options import Json, UserError
from simpletune.system.safetensors_file import WeightReader, read_header, write_safetensors
from simpletune.system.shell import quote_command
from simpletune.training.finish import report_or_warning

CPU = torch.device("cpu")


def finish_early(name: str) -> Path:
    """Write the files of a finished run from one of its checkpoints, and return the result's file or folder.

    Args:
        name: ``RUN`` for its newest intact checkpoint, or ``RUN@STEP``.

    Raises:
        UserError: the run or checkpoint does not exist, the run is finished, or another process is training it.
    """
    named = find_run(name)
    run, config = named.folder, run_config(named.folder)
    with exclusive(run, "with Ctrl-C: it saves first"), room_for("writing the result", run):
        lost = read_summary(run) if named.step is None and is_unfinished(run) else None
        if lost is not None and lost.get("complete"):  # the run had finished, but its result is gone
            saved = read_intact(named)
            if saved.step == lost["steps"]:
                return restore_result(run, saved, lost)
        refuse_finished(named)
        saved = read_intact(named)
        summary, warnings = summary_at(run, resolve_model_folder(config), saved), list[str]()
        output = export(run, config, saved)
        summary |= {"output": str(output), CHECKSUMS: result_checksums(config, run), "warnings": warnings}
        summary[FIGURES] = figure_sums(run)
        write_json(run / SUMMARY, summary | {"complete": False})
        card = write_card(run, config, summary, saved.manifest)
        page = report_or_warning(run, warnings.append) if config.output.report else None
        write_json(run / SUMMARY, summary | {"complete": True})
    for warning in warnings:
        say(f"warning {warning}")
    say(f"{run}: {summary.get('status', 'finished')}, without training")
    for what, place in {"result": output, "model card": card, "report": page, "figures": run / SUMMARY}.items():
        if place is not None:
            say(f"  {what:<12} {place}")
    if "status" in summary:
        say(f"  {'draw with it':<12} {quote_command('simpletune', 'generate', '--run', run)}")
        say("To continue training, run the command that started it with --resume latest")
    return output


def restore_result(run: Path, saved: checkpoint.SavedState, summary: Json) -> Path:
    """Export what is missing or damaged of a finished run's result again from the checkpoint that it was exported from;
    set damaged files aside, and return the result's file or folder."""
    config = read_saved(json.dumps(saved.config))
    damaged = damaged_results(config, run, summary)
    for place in damaged:
        if os.path.lexists(place):
            set_aside(place, f"does not match {SUMMARY}")
        else:
            say(f"warning {place} is missing")
    output = result_files(config, run)[0]
    if damaged:
        output = export(run, config, saved)
        write_json(run / SUMMARY, summary | {"output": str(output), CHECKSUMS: result_checksums(config, run)})
        say(f"exported the result again from {saved.folder}")
    return output


def refuse_finished(named: CheckpointRef) -> None:
    """Refuse a finished run without a later checkpoint; one that was finished early may be finished again from another
    checkpoint."""
    run, step, _ = named
    steps, found = finished_steps(run), list_checkpoints(run)
    if steps is None or (found and found[-1][0] > steps):
        return
    early = (read_json_or_none(run / SUMMARY) or {}).get("status")
    if early and step not in (None, steps):
        return
    result = find_in_run(CheckpointRef(run))
    others = ", ".join(f"{run}@{number}" for number, _ in found if number != steps)
    hint = f" Name other checkpoints directly: {others}" if others else ""
    how = early or f"{steps} steps"
    raise UserError(f"{run} is already finished ({how}). Its result is {result.lora or result.denoiser}.{hint}")


def read_intact(named: CheckpointRef) -> checkpoint.SavedState:
    """Read the named checkpoint, or the newest intact one. Raises UserError if there is none."""
    run, step, _ = named
    if step is not None:
        return _read(checkpoint_folder(run, step))
    found = list_checkpoints(run)
    for _, folder in reversed(found):
        try:
            return _read(folder)
        except UserError as error:
            say(f"skipped: {error}")
    reason = f"all of its {len(found)} checkpoints are damaged" if found else "it has no checkpoint"
    raise UserError(f"{run} cannot be finished: {reason}. Continue training until the run saves")


def _read(folder: Path) -> checkpoint.SavedState:
    """Read a checkpoint and verify its checksums."""
    try:
        return checkpoint.read_checkpoint(folder)
    except UserError as error:  # its remedy applies to --resume
        raise UserError(str(error).removeprefix("--resume: ").partition(". ")[0]) from None


def export(run: Path, config: TrainConfig, saved: checkpoint.SavedState) -> Path:
    """Write the result as at the end of a run, from the average if the run keeps one."""
    adapter, metadata = config.adapter, checkpoint.metadata_of(run, config, saved.step)
    if adapter.exports_to_checkpoints:  # of 0.1.0, the checkpoint's header names local folders
        names = [file.name for file in result_files(config, run)]
        for name in names:
            header = {**read_header(saved.folder / name).get("__metadata__", {}), **metadata}
            header.pop("format", None)
            write_safetensors(WeightReader([saved.folder / name]).get_all(), run / name, header)
        return run / names[0]
    trained = find_in_run(CheckpointRef(run, saved.step)).trained
    assert trained is not None
    config = resolve_model_folder(config)
    stack = read_stack(config, run)
    denoiser = config.model.load_denoiser(config.precision, CPU, config.train.seed, overlay=stack)
    overwrite(denoiser, trained)
    return adapter.export(denoiser, run, metadata)
