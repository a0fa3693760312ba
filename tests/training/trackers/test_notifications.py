"""What is posted about a run: its end and, if asked, its pictures; never where the URL is kept."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inbox import Inbox

from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.runs.remote.checkpoint_store import open_checkpoint_store
from simpletune.stages.step.train_step import TrainStep
from simpletune.system import notify
from simpletune.system.options import UserError
from simpletune.system.signals import Stopped
from simpletune.training.trackers import notifications
from simpletune.training.train import train

SECRET = "/hooks/AbCdEf123456"


def texts(inbox: Inbox) -> list[str]:
    return [json.loads(each.body)["text"] for each in inbox.posted]


def run(tiny_config: dict, monkeypatch: pytest.MonkeyPatch, url: str, **tracking: object) -> Path:
    monkeypatch.setenv(notify.VARIABLE, url)
    return train(validate(tiny_config | {"tracking": {"wandb": "offline", **tracking}}, "test"))


def test_the_end_is_posted_and_the_url_is_in_no_file(
    tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config["train"] = {"steps": 1}
    tiny_config["output"]["report"] = True
    with Inbox() as inbox:
        folder = run(tiny_config, monkeypatch, inbox.url + SECRET)
    (text,) = texts(inbox)
    assert text.startswith("tiny finished: 1 step in ") and "with a loss of" in text
    files = [file for place in (folder, tmp_path / "profiles") for file in place.rglob("*") if file.is_file()]
    assert {"report.html", "environment.json", "summary.json"} <= {file.name for file in files}
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []
    assert SECRET not in "".join(capsys.readouterr())


def test_a_run_whose_last_upload_fails_is_not_posted_as_finished(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def store(config: TrainConfig, resume: str | None) -> Iterator[object]:
        with open_checkpoint_store(config, resume) as opened:
            yield opened
        raise UserError("output.store: not all of it could be uploaded")

    tiny_config["train"] = {"steps": 1}
    with Inbox() as inbox:
        with monkeypatch.context() as patched, pytest.raises(UserError, match="not all of it"):
            patched.setattr("simpletune.training.train.open_checkpoint_store", store)
            run(tiny_config, monkeypatch, inbox.url)
        monkeypatch.setenv(notify.VARIABLE, inbox.url)
        train(
            validate(tiny_config | {"tracking": {"wandb": "offline"}}, "test"), resume="auto"
        )  # nothing is left to do
    assert texts(inbox) == ["tiny failed: output.store: not all of it could be uploaded"]


def test_a_failure_and_a_stop_are_posted_with_their_reason(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors: list[BaseException] = [RuntimeError("no\nroom"), Stopped(signal.SIGINT), Stopped(signal.SIGTERM)]
    with Inbox() as inbox:
        url = inbox.url + SECRET
        errors.append(UserError(f"the device's memory is full at {url}\nand more"))
        for error in errors:

            def fail(self: object, model: object, batch: object, error: BaseException = error) -> None:
                raise error

            with monkeypatch.context() as patched, pytest.raises(type(error)):
                patched.setattr(TrainStep, "loss", fail)
                run(tiny_config, patched, url, wandb="disabled")
    assert texts(inbox) == [
        "tiny failed: RuntimeError: no",
        "tiny stopped: SIGINT",
        "tiny stopped: SIGTERM",
        "tiny failed: the device's memory is full at ***",
    ]
    assert SECRET not in "".join(capsys.readouterr())


def test_pictures_are_posted_if_asked(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_config |= {"validation": {"prompts": ["a disc"], "steps": 1, "every": 1}, "train": {"steps": 2}}
    kept: list[str] = []

    class Discord(notify.Receiver):
        def request(self, message: notify.Message) -> object:  # type: ignore[override]
            kept.append(message.line if message.image is None else message.line + " with a picture")
            return super().request(message)

    with Inbox() as inbox:
        receiver = Discord("Discord", "127.0.0.1", inbox.url + SECRET)
        for module in (notifications, "simpletune.training.trackers"):
            name = f"{module}.receiver_or_none" if isinstance(module, str) else f"{module.__name__}.receiver_or_none"
            monkeypatch.setattr(name, lambda: receiver)
        run(tiny_config, monkeypatch, inbox.url + SECRET, wandb="disabled", notify="pictures")
    assert kept[:2] == [f"tiny validation: step {step} with a picture" for step in (1, 2)]
    assert len(kept) == 3 and kept[2].startswith("tiny finished: 2 steps")
    assert [b"\xff\xd8" in each.body for each in inbox.posted] == [True, True, False]


@pytest.mark.parametrize("hangs", [False, True])
def test_who_does_not_answer_stops_no_run(
    hangs: bool, tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notify, "WAIT", 0.2 if hangs else 30.0)
    tiny_config["train"] = {"steps": 1}
    with Inbox(500, hangs) as inbox:
        folder = run(tiny_config, monkeypatch, inbox.url + SECRET, wandb="disabled")
    said = capsys.readouterr().out
    why = "did not answer within 0.2 s" if hangs else "did not take a message (HTTP 500)"
    assert said.count(f"warning notification: JSON (127.0.0.1) {why}") == 1 and SECRET not in said
    assert json.loads((folder / "summary.json").read_text())["complete"]


def test_only_the_first_process_posts(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    with Inbox() as inbox:
        monkeypatch.setenv(notify.VARIABLE, inbox.url)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with notifications.notify_end(validate(tiny_config, "test")):
            pass
    assert inbox.posted == []


def test_check_says_who_is_notified(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    config = validate(tiny_config, "test")
    assert "notifies" not in explain(config)
    monkeypatch.setenv(notify.VARIABLE, f"https://ntfy.sh{SECRET}")
    assert "  notifies   ntfy (ntfy.sh) at the end\n" in explain(config) + "\n" and SECRET not in explain(config)
    monkeypatch.setenv(notify.VARIABLE, f"ntfy.sh{SECRET}")
    assert "no http or https URL" in explain(config) and SECRET not in explain(config)
