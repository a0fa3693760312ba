"""What a run that was resumed, stopped, killed or went wrong reports: time and memory of all attempts, why it ended."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from recorded_runs import write_run
from tiny_runs import fail_at, run_with, stop_at

from simpletune.apps.cli.main import main
from simpletune.runs.folder import METRICS, read_metrics
from simpletune.runs.report import make_report, write_report
from simpletune.runs.report.content import Report
from simpletune.runs.report.run_data import read_run
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.locks import exclusive
from simpletune.system.options import UserError

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
EVERY_TWO = {"checkpoint": {"every": 2}, "train": {"steps": 6}}


def folder_of(tiny_config: dict) -> Path:
    return Path(tiny_config["output"]["runs"]) / tiny_config["name"]


def rows_of(folder: Path) -> list[dict]:
    return json.loads((folder / "attempts.json").read_text())


def facts_of(report: Report) -> dict[str, tuple[str, str]]:
    return {fact.name: (fact.value, fact.note) for fact in report.facts}


def told(report: Report) -> str:
    return " ".join(report.status)


def forget_end(folder: Path, **changes: object) -> None:
    """Make the last process one that was killed: its end is not recorded."""
    rows = rows_of(folder)
    rows[-1] |= {"ended": None, "reason": "", **changes}
    (folder / "attempts.json").write_text(json.dumps(rows))


def test_time_memory_and_cost_are_of_all_attempts(tiny_config: dict, capsys: pytest.CaptureFixture[str]) -> None:
    assert stop_at("step.begun", tiny_config, "term", count=3, **EVERY_TWO) == 143
    folder = folder_of(tiny_config)
    rows = rows_of(folder)
    assert [(row["ended"], row["reason"], row["from_step"], row["last_step"]) for row in rows] == [
        ("stopped", "SIGTERM", 0, 3)
    ]
    rows[0]["seconds"] += 1000
    rows[0]["seconds_setup"] += 900
    rows[0]["stages"]["train"] |= {"seconds": 50.0, "peak_rss_gib": 99.0}
    (folder / "attempts.json").write_text(json.dumps(rows))
    capsys.readouterr()
    run_with(tiny_config, "auto", output={"report": True}, **EVERY_TWO)
    said = capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    first, second = rows_of(folder)
    assert (second["ended"], second["from_step"], second["last_step"]) == ("finished", 3, 6)
    assert summary["attempts"] == 2 and summary["seconds_setup"] > 900
    assert summary["seconds_total"] == pytest.approx(first["seconds"] + second["seconds"], abs=0.02)
    assert summary["peak_rss_gib"] == summary["stages"]["train"]["peak_rss_gib"] == 99.0
    assert summary["stages"]["train"]["seconds"] == pytest.approx(50 + second["stages"]["train"]["seconds"], abs=1e-3)
    assert "done in 16 min" in said and "2 attempts" in said and "99.00 GiB" in said
    assert "16 min" in (folder / "README.md").read_text()
    report = make_report([folder], price=3.6)
    value, note = facts_of(report)["Whole job"]
    assert value.startswith("16 min") and "2 attempts" in note
    assert dict(report.priced)["the whole job"] == summary["seconds_total"]
    twin = (folder / "report.md").read_text()
    assert "esumed" in twin and "from step 3" in twin and "stopped by SIGTERM" in twin


def test_a_killed_process_counts_up_to_its_last_step(tiny_config: dict) -> None:
    """What it recorded at its last checkpoint, and the seconds of the steps after it."""
    fail_at("step.begun", tiny_config, count=4, **EVERY_TWO)
    folder = folder_of(tiny_config)
    forget_end(folder, last_step=2, seconds=100.0)
    metrics = read_metrics(folder)
    assert len(metrics) >= 2
    lost = {"step": 3, "epoch": 0, "loss": 1.0, "lr": 0.1, "seconds": 7.0, "grad_norm": 1.0}
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in [*metrics[:2], lost]))
    killed = make_report([folder])
    assert "killed" in told(killed) and "3 of 6" in told(killed) and "going on" not in told(killed)
    assert facts_of(killed)["Time so far"][0] == "1 min 47 s"
    run_with(tiny_config, "latest", **EVERY_TWO)
    first, second = rows_of(folder)
    assert (first["ended"], first["last_step"], first["seconds"]) == ("killed", 3, 107.0)
    assert second["from_step"] == 2
    assert json.loads((folder / "summary.json").read_text())["seconds_total"] > 107
    (section,) = [section for section in make_report([folder]).sections if section.name == "attempts"]
    assert "1 step" in " ".join(section.notes) and "repeated" in " ".join(section.notes)


def test_processes_before_the_first_checkpoint_count_too_but_not_for_a_run_begun_anew(tiny_config: dict) -> None:
    fail_at("step.begun", tiny_config, count=2)
    folder = run_with(tiny_config, "auto")
    assert [(row["ended"], row["from_step"]) for row in rows_of(folder)] == [("failed", 0), ("finished", 0)]
    run_with(tiny_config)
    assert len(rows_of(folder)) == 1


def test_running_is_told_from_stopped_and_killed_by_the_lock(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", steps=9, finished=False)
    row = {"started": "2026-11-22T03:47:39+00:00", "device": "cpu", "from_step": 0, "last_step": 4, "seconds": 8.0}
    (folder / "attempts.json").write_text(json.dumps([row]))
    with exclusive(folder):
        running = make_report([folder])
    assert "still running" in told(running) and "9 of 40" in told(running)
    assert "killed" in told(make_report([folder])) and "still running" not in told(make_report([folder]))
    (folder / "attempts.json").write_text(json.dumps([{**row, "ended": "stopped", "reason": "SIGINT"}]))
    assert "stopped by SIGINT" in told(make_report([folder]))
    both = make_report([folder, write_run(tmp_path / "whole")])
    assert any(note.startswith("demo: ") and "SIGINT" in note for note in both.status)


@pytest.mark.parametrize("every", [None, 2])
def test_a_diverged_run_says_why_in_its_report(
    every: int | None, tiny_config: dict, write_config, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The words of the terminal; the remedy fits whether there is a checkpoint."""
    honest, calls = TrainStep.step, []

    def step(self: TrainStep, batches: list, gate: object = None) -> object:
        calls.append(0)
        if len(calls) < 4:
            return honest(self, batches, gate)
        hook = self.parameters[3].register_hook(lambda grad: grad * math.nan)
        try:
            return honest(self, batches, gate)
        finally:
            hook.remove()

    monkeypatch.setattr(TrainStep, "step", step)
    tiny_config |= {"checkpoint": {"every": every} if every else {}, "train": {"steps": 6}}
    assert main(["train", str(write_config(tiny_config))]) == 4
    error = capsys.readouterr().err.removeprefix("error: ").strip()
    folder = folder_of(tiny_config)
    (row,) = rows_of(folder)
    assert (row["ended"], row["reason"]) == ("failed", error)
    status = told(make_report([folder]))
    assert "step 4" in status and "lora_B.default.weight" in status and "still" not in status
    assert (f"{folder.parent}" in status) is False  # pages are passed on: of absolute paths the last name
    if every:
        assert "step-000002" in status and "continue" in status and "--resume latest" in status
    else:
        assert "no checkpoint" in status and "start again" in status and "--resume" not in status


@pytest.mark.parametrize(
    ("place", "error", "message", "told_as"),
    [
        ("training.trainer.Trainer._steps", OUT_OF_MEMORY, "no checkpoint", "memory is full"),
        ("training.metrics.append_metrics", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "is full", "is full"),
        ("training.load_job.load_model", ValueError("no such layer"), "no such layer", "ValueError: no such layer"),
    ],
)
def test_why_a_run_failed_is_kept(
    place: str, error: Exception, message: str, told_as: str, tiny_config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"simpletune.{place}", fail)
    with pytest.raises(ValueError if isinstance(error, ValueError) else UserError, match=message) as caught:
        run_with(tiny_config)
    folder = folder_of(tiny_config)
    (row,) = rows_of(folder)
    assert row["ended"] == "failed" and told_as in told(make_report([folder]))
    if error is OUT_OF_MEMORY:
        assert row["reason"] == str(caught.value) and "--resume" not in row["reason"]


def test_a_record_that_cannot_be_written_does_not_hide_why(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def broken(*_: object) -> None:
        monkeypatch.setattr("simpletune.runs.attempts.write_json", full)
        raise ValueError("no such layer")

    monkeypatch.setattr("simpletune.training.load_job.load_model", broken)
    with pytest.raises(ValueError, match="no such layer"):
        run_with(tiny_config)
    assert "warning" in capsys.readouterr().out


def test_what_comes_after_the_end_does_not_make_it_a_failure(tiny_config: dict, monkeypatch) -> None:
    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("simpletune.training.finish.print_results", gone)
    with pytest.raises(BrokenPipeError):
        run_with(tiny_config)
    assert rows_of(folder_of(tiny_config))[0]["ended"] == "finished"


def test_damaged_metrics_do_not_keep_a_run_from_beginning_anew(tiny_config: dict) -> None:
    fail_at("step.begun", tiny_config, count=3)
    folder = folder_of(tiny_config)
    forget_end(folder)
    (folder / METRICS).write_text('{"step"\n{"step": 2}\n')
    run_with(tiny_config, "auto")
    assert [row["ended"] for row in rows_of(folder)] == ["killed", "finished"]


def test_a_damaged_record_is_set_aside_and_said(tiny_config: dict, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(tiny_config)
    folder = folder_of(tiny_config)
    (folder / "attempts.json").write_text('[{"started"')
    assert "attempts.json cannot be read" in told(make_report([folder]))
    capsys.readouterr()
    run_with(tiny_config, "latest", train={"steps": 6})
    assert "attempts.json.damaged" in capsys.readouterr().out
    assert len(rows_of(folder)) == 1
    assert "steps 1 to 4" in " ".join(note for part in make_report([folder]).sections for note in part.notes)


def test_the_pace_leaves_out_the_warm_up_of_each_process(tmp_path: Path) -> None:
    """Loss and pace after a resume: each step once, as it was done last."""
    folder = write_run(tmp_path / "demo", steps=6, finished=False)
    rows = [{**row, "seconds": 100.0 if row["step"] in (1, 2, 4, 5) else 1.0} for row in read_metrics(folder)]
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = {"started": "2026-11-22T03:47:39+00:00", "device": "cpu", "from_step": 0, "last_step": 4, "seconds": 8.0}
    attempts = [{**row, "ended": "killed"}, {**row, "from_step": 3, "ended": "stopped", "reason": "SIGTERM"}]
    (folder / "attempts.json").write_text(json.dumps(attempts))
    assert read_run(folder).seconds_per_step == 1.0


def test_reports_of_an_unfinished_run_and_of_several_show_time_and_resumes(tiny_config: dict, tmp_path: Path) -> None:
    stop_at("step.begun", tiny_config, "term", count=3, **EVERY_TWO)
    folder = folder_of(tiny_config)
    report = make_report([folder])
    facts = facts_of(report)
    assert "GiB" in facts["Peak of the whole job"][0] or "MiB" in facts["Peak of the whole job"][0]
    (memory,) = [section for section in report.sections if section.name == "memory"]
    assert {"train", "save"} <= {row[0] for row in memory.tables[0].rows}
    assert "Time so far" in facts and "the time so far" in dict(report.priced)
    write_report(report, folder / "report.html")
    run_with(tiny_config, "auto", **EVERY_TWO)
    shutil.copytree(folder, tmp_path / "other")
    report = make_report([folder, tmp_path / "other"], price=1.0)
    (figures,) = [section for section in report.sections if section.name == "figures"]
    (time,) = [table for table in figures.tables if "time" in table.head]
    assert [row[0] for row in time.rows] == ["tiny", "other"] and "$" in time.rows[0][2]
    assert time.rows[0][3:] == ("2 attempts; resumed from step 3", "finished")
