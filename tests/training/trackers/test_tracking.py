"""Trackers: what reaches them, what they never do (ask, wait, leak), and runs that outlive them."""

from __future__ import annotations

import copy
import io
import json
import struct
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from simpletune.config.load import validate
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.options import UserError
from simpletune.training.trackers import Trackers, weights_and_biases
from simpletune.training.trackers.tensor_board import TensorBoard
from simpletune.training.trackers.weights_and_biases import has_credentials, run_id
from simpletune.training.train import train

BLOCK = 32768
MARKER = "c0ffee" * 6 + "abcd"  # 40 characters, the form of an API key
SECRETS = {
    "WANDB_API_KEY": MARKER, "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789",
    "MY_SECRET": "correct horse battery staple",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that knows nothing of wandb, and whose terminal must not be read."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("builtins.input", refuse)
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it reads the environment once a process


def refuse(*args: object) -> str:
    raise AssertionError("a tracker asked at the prompt")


def run_with(tiny_config: dict, resume: str | None = None, **changes: Any) -> Path:
    data = copy.deepcopy(tiny_config)
    for section, values in changes.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return train(validate(data, "test"), resume)


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def wandb_records(run: Path) -> list[Any]:
    """What wandb's offline files of a run hold, in order of time."""
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    return [record for file in files for record in whole_records(file, newest=file == files[-1])]


def whole_records(file: Path, newest: bool) -> list[Any]:
    """The records of a file once wandb's service has written the last one: a busy machine needs seconds after
    ``finish``. An older file without a run is of a start that failed."""
    late = time.monotonic() + 60
    while True:
        records = records_of(file)
        kinds = {record.WhichOneof("record_type") for record in records}
        if "exit" in kinds or not (newest or "run" in kinds):
            return records
        assert time.monotonic() < late, f"{file} has no end"
        time.sleep(0.2)


def records_of(file: Path) -> list[Any]:
    """Read protocol buffers in LevelDB's log format, after a head of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    records = []
    data, place, pending = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # the rest of a block is filled with zeros
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        if place + 7 + length > len(data):
            break  # still being written
        pending += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            records.append(wandb_internal_pb2.Record.FromString(pending))
            pending = b""
    return records


def history(records: list[Any]) -> list[dict[str, Any]]:
    rows = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]


def test_wandb_offline_has_everything_in_the_runs_folder_and_no_secret(
    tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor has any other file, or what is printed."""
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    changes = {"validation": {"prompts": ["a red disc"], "steps": 2, "loss_samples": 4}, "train": {"steps": 3}}
    changes |= {"profile": {"max_traces": 1}, "output": {"report": True}}
    run = run_with(tiny_config, **changes, tracking={"tensorboard": True, "wandb": "offline", "wandb_project": "discs"})
    records = wandb_records(run)
    rows = history(records)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    assert all({"lr", "seconds", "grad_norm"} <= set(row) for row in rows if "loss" in row)
    assert [row["step"] for row in rows if "training_loss_fixed_noise" in row] == [0, 3]
    assert [row["samples/_type"] for row in rows if "samples/_type" in row] == ["image-file"]
    assert len(list(run.glob("wandb/offline-run-*/files/media/images/*.png"))) == 1
    started = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (started.project, started.display_name, started.run_id) == ("discs", "tiny", run_id(run))
    configs = [record.config for record in records if record.WhichOneof("record_type") == "config"]
    logged = {i.key or "/".join(i.nested_key): i.value_json for c in [*configs, started.config] for i in c.update}
    assert json.loads(logged["adapter"])["rank"] == 2
    summaries = [record.summary for record in records if record.WhichOneof("record_type") == "summary"]
    assert "eval_loss_after" in {i.key for summary in summaries for i in summary.update}
    assert summary_of(run)["warnings"] == []
    files = [file for place in (run, tmp_path / "profiles") for file in place.rglob("*") if file.is_file()]
    names = {file.name for file in files}
    assert {"config.json", "summary.json", "README.md", "report.html", "state.json", "metrics.jsonl"} <= names
    assert any(file.suffix == ".wandb" for file in files) and any("tfevents" in name for name in names)
    shown = "".join(capfd.readouterr())
    for secret in SECRETS.values():
        assert [file for file in files if secret.encode() in file.read_bytes()] == []
        assert secret not in shown
    assert [f for f in (tmp_path / "home").rglob("*") if f.is_file()] == [], "wandb wrote outside the run's folder"


def test_a_resumed_run_is_the_same_run_in_wandb(tiny_config: dict) -> None:
    run = run_with(tiny_config, train={"steps": 2}, tracking={"wandb": "offline"})
    first = run_id(run)
    run_with(tiny_config, "latest", train={"steps": 4}, tracking={"wandb": "offline"})
    records = wandb_records(run)
    ids = {record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}
    assert ids == {first}
    assert [row["step"] for row in history(records) if "loss" in row] == [1, 2, 3, 4]
    another = run_with(tiny_config, train={"steps": 1}, tracking={"wandb": "offline"})
    assert run_id(another) != first


def test_online_without_credentials_goes_offline_and_says_so(tiny_config: dict, monkeypatch, capsys) -> None:
    """Without a terminal too: nothing waits for an answer."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    run = run_with(tiny_config, train={"steps": 1}, tracking={"wandb": "online"})
    line = "wandb: continues offline, because online needs an API key (WANDB_API_KEY or `wandb login`)"
    shown = capsys.readouterr().out
    assert shown.count(line) == 1
    assert summary_of(run)["warnings"] == [line]
    assert f"wandb sync {run}/wandb/offline-run-*" in shown
    assert list(run.glob("wandb/offline-run-*/*.wandb"))


def test_online_without_an_answer_goes_offline(tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("WANDB_API_KEY", MARKER)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(weights_and_biases, "INIT_SECONDS", 2)
    run = run_with(tiny_config, train={"steps": 1}, tracking={"wandb": "online"})
    (warning,) = summary_of(run)["warnings"]
    assert "wandb: continues offline" in warning and "(CommError" in warning
    assert [row["step"] for row in history(wandb_records(run)) if "loss" in row] == [1]
    assert MARKER not in capsys.readouterr().out
    files = [file for file in run.rglob("*") if file.is_file()]
    assert [file for file in files if MARKER.encode() in file.read_bytes()] == []


METHODS = ("scalars", "image", "report", "summary", "close")


class Stub:
    """A tracker that fails in one method."""

    def __init__(self, broken: str):
        self.broken, self.calls = broken, []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.call(name)

    def call(self, name: str) -> str:
        self.calls.append(name)
        if name == self.broken:
            raise RuntimeError("no space\nleft")
        return name


@pytest.mark.parametrize("broken", ["maker", *METHODS])
def test_a_tracker_that_fails_is_said_once_and_is_off(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = Stub(broken), Stub("nothing")

    def make(warn: object) -> Stub:
        bad.call("maker")
        return bad

    with Trackers({"bad": make, "good": lambda warn: good}) as trackers:
        trackers.scalars(1, {"loss": 1.0})
        trackers.image(1, "samples", Image.new("RGB", (2, 2)))
        trackers.report(Path("report.html"))
        places = trackers.finish({})
    assert good.calls == list(METHODS)
    assert bad.calls == ["maker", *METHODS][: ["maker", *METHODS].index(broken) + 1]
    line = "bad failed and is off for the rest of the run (RuntimeError: no space left)"
    assert trackers.warnings == [line] and capsys.readouterr().out.count(line) == 1
    assert places["good"] == "summary"

    def stop(warn: object) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trackers({"x": stop})


def test_one_failing_tracker_leaves_the_other(tiny_config: dict, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    run = run_with(tiny_config, train={"steps": 1}, tracking={"wandb": "offline"})
    (warning,) = summary_of(run)["warnings"]
    assert "wandb failed and is off for the rest of the run" in warning
    assert list((tmp_path / "profiles" / "tiny").glob("events.*"))


def test_the_report_reaches_the_trackers(tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In TensorBoard beside the configuration and the summary."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    page = "<!doctype html><title>all of it</title>"

    def report_at_end(folder: Path) -> Path:
        (folder / "report.html").write_text(page)
        return folder / "report.html"

    monkeypatch.setattr("simpletune.runs.report.report_at_end", report_at_end)
    tiny_config["output"]["report"] = True
    run = run_with(tiny_config, train={"steps": 1}, tracking={"wandb": "offline"})
    assert summary_of(run)["warnings"] == []
    (logged,) = run.glob("wandb/offline-run-*/files/media/html/report_*.html")
    assert logged.read_text() == page
    assert [row["report/_type"] for row in history(wandb_records(run)) if "report/_type" in row] == ["html-file"]
    events = EventAccumulator(str(tmp_path / "profiles" / "tiny")).Reload()
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert texts["report/text_summary"] == f"`{run}/report.html`"
    assert '"rank": 2' in texts["config/text_summary"] and '"final_loss"' in texts["summary/text_summary"]


def test_what_tensorboards_thread_cannot_write_is_said_at_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(self: object, data: bytes) -> None:
        raise OSError("no space left")

    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    others = set(threading.enumerate())
    with Trackers({"TensorBoard": lambda warn: TensorBoard(tmp_path, 0, {})}) as trackers:
        (writer,) = set(threading.enumerate()) - others
        monkeypatch.setattr(RecordWriter, "write", full)
        trackers.scalars(1, {"loss": 1.0})
        trackers.finish({})
    writer.join(120)  # it may die later than its exception is seen, and pytest would blame the next test
    assert [str(each.exc_value) for each in died] == ["no space left"]
    assert trackers.warnings == ["TensorBoard failed and is off for the rest of the run (OSError: no space left)"]


class FakeTrackio(ModuleType):
    """Stands for trackio: keeps what is logged, and prints as it does."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.ends = 0

    def init(self, **options: Any) -> FakeTrackio:
        print("* Trackio project initialized")
        self.started.append(options)
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def Image(self, image: Image.Image) -> tuple[str, str]:  # noqa: N802
        return "image", image.mode

    def Markdown(self, text: str) -> tuple[str, str]:  # noqa: N802
        return "text", text

    def finish(self) -> None:
        print("* Run finished")
        self.ends += 1


def test_trackio_has_figures_pictures_and_summary(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    changes = {"validation": {"prompts": ["a red disc"], "steps": 1}, "tracking": {"trackio": "discs"}}
    run = run_with(tiny_config, train={"steps": 2}, **changes)
    assert summary_of(run)["warnings"] == []
    (started,) = fake.started
    assert {key: started[key] for key in ("project", "name", "resume", "private")} == {
        "project": "discs", "name": "tiny", "resume": "never", "private": True,
    }  # fmt: skip
    assert started["config"]["adapter"]["rank"] == 2
    assert [step for step, values in fake.logged if "loss" in values] == [1, 2]
    assert (2, {"samples": ("image", "RGB")}) in fake.logged
    last = fake.logged[-1]
    assert last[0] == 2 and '"final_loss"' in last[1]["summary"][1] and fake.ends == 1
    shown = capsys.readouterr().out
    assert "* " not in shown and "trackio show --project discs" in shown
    run_with(tiny_config, "latest", train={"steps": 3}, tracking={"trackio": "discs"})
    assert fake.started[1]["resume"] == "allow"
    assert [step for step, values in fake.logged if "loss" in values] == [1, 2, 3]


def test_without_trackio_the_warning_says_how_to_install_it(tiny_config: dict, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    (warning,) = summary_of(run_with(tiny_config, train={"steps": 1}, tracking={"trackio": "discs"}))["warnings"]
    assert "trackio failed and is off for the rest of the run (ImportError: " in warning
    assert "-m pip install --no-deps trackio gradio-client" in warning


def test_nothing_is_loaded_or_written_when_all_is_off(tiny_config: dict, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "trackio", None)
    run = run_with(tiny_config, train={"steps": 1}, tracking={"tensorboard": False})
    assert summary_of(run)["warnings"] == []
    assert not (tmp_path / "profiles").exists() and not (run / "wandb").exists()


def test_a_run_that_fails_is_closed_as_failed(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(TensorBoard, "close", lambda self, failed: closed.append(failed))
    run_with(tiny_config, train={"steps": 1})
    honest = TrainStep.loss
    monkeypatch.setattr(TrainStep, "loss", lambda self, model, batch: honest(self, model, batch) * float("nan"))
    with pytest.raises(UserError, match="the loss is nan"):
        run_with(tiny_config, train={"steps": 1})
    assert closed == [False, True]


def test_only_the_first_process_logs(tiny_config: dict, tmp_path: Path) -> None:
    from simpletune.training.trackers import open_trackers

    with open_trackers(validate(tiny_config, "test"), tmp_path, 0, writes=False) as trackers:
        trackers.scalars(1, {"loss": 1.0})
        trackers.image(1, "samples", Image.new("RGB", (2, 2)))
    assert trackers.warnings == [] and not (tmp_path / "profiles").exists()


@pytest.mark.parametrize(
    ("environment", "entry", "expected"),
    [
        ({}, None, False),
        ({"WANDB_API_KEY": ""}, None, False),
        ({"WANDB_API_KEY": MARKER}, None, True),
        ({}, f"machine api.wandb.ai login user password {MARKER}", True),
        ({}, f"machine api.forge.coreweave.com login user password {MARKER}", True),
        ({}, f"machine other.org login user password {MARKER}", False),
        ({"WANDB_BASE_URL": "https://other.org"}, f"machine other.org login user password {MARKER}", True),
        ({}, "machine api.wandb.ai login", False),
    ],
)
def test_what_counts_as_credentials(environment: dict, entry: str | None, expected: bool, tmp_path: Path) -> None:
    if entry is not None:
        file = tmp_path / "home" / ".netrc"
        file.write_text(entry + "\n")
        file.chmod(0o600)
    assert has_credentials({"HOME": str(tmp_path / "home"), **environment}) is expected


@pytest.mark.parametrize(
    ("tracking", "message"),
    [
        ({"wandb": "on"}, "tracking.wandb"),
        ({"wandb": True}, "tracking.wandb"),
        ({"tensorboard": "true"}, "tracking.tensorboard: .*true or false, without quotes"),
        ({"wandb_project": "a/b"}, "tracking.wandb_project"),
        ({"trackio": "a/b"}, "tracking.trackio"),
        ({"notify": "all"}, "tracking.notify"),
        ({"wand": "online"}, "tracking.wand: unknown field.*did you mean wandb|tracking.wand: .*wandb"),
    ],
)
def test_the_section_is_strict(tracking: dict, message: str, tiny_config: dict) -> None:
    with pytest.raises(UserError, match=message):
        validate({**tiny_config, "tracking": tracking}, "test")


def test_a_run_that_wandb_does_not_keep_names_no_folder_to_upload(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = object.__new__(weights_and_biases.Wandb)
    tracker._folder, tracker._run = tmp_path, SimpleNamespace(offline=False, url=None, summary={})
    assert tracker.summary({"steps": 2}) == "nothing is kept: wandb is off (WANDB_MODE=disabled)"
    (tmp_path / "offline-run-1").mkdir()
    assert tracker.summary({}) == f"wandb sync {tmp_path}/offline-run-*"
    tracker._run.url = "https://wandb.ai/x"
    assert tracker.summary({}) == "https://wandb.ai/x"
