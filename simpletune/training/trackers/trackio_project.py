"""Log to trackio: a project on this machine, which ``trackio show`` shows, or in a Space of Hugging Face."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletune.system.options import Json
from simpletune.system.shell import install_command, quote_command

if TYPE_CHECKING:
    from PIL.Image import Image

# without dependencies, because it asks for Pillow below 13
PACKAGES = ("--no-deps", "trackio", "gradio-client", "brotli", "orjson", "python-multipart")


class Trackio:
    """Log a run to a project of trackio; a resumed run continues the run of its name.

    Args:
        name: name of the run.
        project: trackio's project.
        start: step that a resumed run starts from.
        config: the run's configuration.
    """

    def __init__(self, name: str, project: str, start: int, config: Json):
        try:
            import trackio
        except ImportError as error:
            raise ImportError(f"{error}. Install it: {install_command(*PACKAGES)}") from None
        self._trackio: Any = trackio
        self._project, self._step = project, start
        about = {key: value for key, value in config.items() if not key.startswith("$")}
        options = {"embed": False, "private": True, "auto_log_gpu": False, "auto_log_cpu": False}
        with redirect_stdout(io.StringIO()):  # its hints; where to look is printed at the end
            self._run = trackio.init(
                project=project, name=name, config=about, resume="allow" if start else "never", **options
            )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._step = step
        self._run.log(values, step=step)

    def image(self, step: int, name: str, image: Image) -> None:
        self._run.log({name: self._trackio.Image(image.convert("RGB"))}, step=step)

    def report(self, file: Path) -> None:
        pass  # trackio shows no pages

    def summary(self, values: Json) -> str:
        text = f"```json\n{json.dumps(values, indent=2)}\n```"
        self._run.log({"summary": self._trackio.Markdown(text)}, step=values.get("steps", self._step))
        return quote_command("trackio", "show", "--project", self._project)

    def close(self, failed: bool) -> None:
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()  # also forgets the run, which it would end again at exit
