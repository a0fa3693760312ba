"""Post a run's end and its validation pictures (``system/notify.py``). A failure is a warning, never an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.config.schema import TrainConfig, run_folder
from simpletune.runs.attempts import describe_end
from simpletune.runs.folder import read_summary
from simpletune.system.console import duration
from simpletune.system.notify import Message, Receiver, Sender, as_jpeg, post_now, receiver_or_none
from simpletune.system.options import Json, plural
from simpletune.system.processes import is_first_process

if TYPE_CHECKING:
    from PIL.Image import Image


class Notifications:
    """Posts validation pictures as a tracker."""

    def __init__(self, name: str, receiver: Receiver, warn: Callable[[str], None]):
        self._name, self._sender = name, Sender(receiver, warn)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        pass

    def image(self, step: int, name: str, image: Image) -> None:
        self._sender.send(Message(self._name, "validation", f"step {step}", as_jpeg(image)))

    def report(self, file: Path) -> None:
        pass

    def summary(self, values: Json) -> str:
        return str(self._sender.receiver)

    def close(self, failed: bool) -> None:
        self._sender.close()


@dataclass
class End:
    """What is posted of a run's end. ``silent``: nothing, because nothing was trained."""

    silent: bool = False


@contextmanager
def notify_end(config: TrainConfig) -> Iterator[End]:
    """Post how the run within this context ended, and why; only the first of several processes does."""
    receiver, end = receiver_or_none() if is_first_process() else None, End()
    try:
        yield end
    except BaseException as error:
        if receiver is not None:
            ended, reason = describe_end(error)
            post_now(receiver, Message(config.name, ended, reason.partition("\n")[0]))
        raise
    if receiver is not None and not end.silent:
        post_now(receiver, Message(config.name, "finished", _result(read_summary(run_folder(config)) or {})))


def _result(summary: Json) -> str:
    """Describe a finished run in a few figures; no paths and no prompts, because others may read them."""
    parts = [plural(summary["steps"], "step")] if "steps" in summary else ["no summary"]
    if summary.get("seconds_total") is not None:
        parts.append(f"in {duration(summary['seconds_total'])}")
    if summary.get("final_loss") is not None:
        parts.append(f"with a loss of {summary['final_loss']:.4f}")
    return " ".join(parts)
