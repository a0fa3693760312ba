"""Who else is told a run's metrics and pictures? TensorBoard, wandb, trackio, a webhook; one that fails is off.

A new one takes a file here with a ``Tracker``, a field in ``Tracking`` (config/schema.py) and a line in
``open_trackers``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from simpletune.config.schema import TrainConfig, profile_folder
from simpletune.system.console import say
from simpletune.system.notify import receiver_or_none
from simpletune.system.options import Json
from simpletune.system.printable import describe_exception
from simpletune.system.redact import redact
from simpletune.training.trackers.tensor_board import TensorBoard

if TYPE_CHECKING:
    from PIL.Image import Image

Warn = Callable[[str], None]
P = ParamSpec("P")
T = TypeVar("T")


class Tracker(Protocol):
    """Logs a run; ``Trackers`` disables a tracker whose method fails."""

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log numbers at a step."""

    def image(self, step: int, name: str, image: Image) -> None:
        """Log a picture at a step."""

    def report(self, file: Path) -> None:
        """Log the run's HTML report."""

    def summary(self, values: Json) -> str:
        """Log the summary at the end of a run; returns where to view the run, or the command for it."""

    def close(self, failed: bool) -> None:
        """Flush and close; ``failed``: whether the run was stopped or failed."""


class Trackers:
    """A run's trackers. A failing tracker is disabled with a warning and never fails the run.

    Args:
        makers: factories by name; each gets a function that prints a warning.
    """

    def __init__(self, makers: dict[str, Callable[[Warn], Tracker]]):
        self.warnings: list[str] = []
        self._open: dict[str, Tracker] = {}
        for name, make in makers.items():
            if (tracker := self._guarded(name, make, self.warn)) is not None:
                self._open[name] = tracker

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, tracker in list(self._open.items()):
            self._guarded(name, tracker.scalars, step, values)

    def image(self, step: int, name: str, image: Image) -> None:
        for which, tracker in list(self._open.items()):
            self._guarded(which, tracker.image, step, name, image)

    def report(self, file: Path) -> None:
        for name, tracker in list(self._open.items()):
            self._guarded(name, tracker.report, file)

    def finish(self, summary: Json) -> dict[str, str]:
        """Log the summary, and close; returns where to view each tracker, by name."""
        places: dict[str, str] = {}
        for name, tracker in list(self._open.items()):
            if (place := self._guarded(name, tracker.summary, summary)) is not None:
                places[name] = place
        self.close()
        return places

    def close(self, failed: bool = False) -> None:
        """Flush and close all trackers; a second call does nothing."""
        for name, tracker in list(self._open.items()):
            self._guarded(name, tracker.close, failed)
        self._open.clear()

    def _guarded(self, name: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a tracker's function; after an error, return None and disable the tracker for the rest of the run."""
        try:
            return call(*args, **kwargs)
        except Exception as error:  # a tracker must not fail the run
            self._open.pop(name, None)
            self.warn(f"{name} failed and is off for the rest of the run ({describe_exception(error)})")
            return None

    def warn(self, text: str) -> None:
        """Print a warning and add it to the run's summary."""
        text = redact(text)
        self.warnings.append(text)
        say(f"warning {text}")


def open_trackers(config: TrainConfig, folder: Path, start: int, writes: bool = True) -> Trackers:
    """Open the trackers that the configuration, as the user gave it, enables; only the first of several processes
    ``writes``. ``start``: the step that a resumed run starts from."""
    option, values = config.tracking, config.model_dump(mode="json", by_alias=True)
    makers: dict[str, Callable[[Warn], Tracker]] = {}
    if writes and option.tensorboard:
        makers["TensorBoard"] = lambda warn: TensorBoard(profile_folder(config), start, values)
    if writes and option.wandb != "disabled":
        from simpletune.training.trackers.weights_and_biases import Wandb

        online = option.wandb == "online"
        makers["wandb"] = lambda warn: Wandb(folder, config.name, option.wandb_project, online, values, warn)
    if writes and option.trackio is not None:
        from simpletune.training.trackers.trackio_project import Trackio

        project = option.trackio
        makers["trackio"] = lambda warn: Trackio(config.name, project, start, values)
    if writes and option.notify == "pictures" and (receiver := receiver_or_none()) is not None:
        from simpletune.training.trackers.notifications import Notifications

        makers["notification"] = lambda warn: Notifications(config.name, receiver, warn)
    return Trackers(makers)
