"""wandb, online or offline: everything it writes lies in the run's folder, and it never asks at a prompt."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from simpletune.training.trackers.tracker import Json

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER, ID = "wandb", "run_id"
INIT_SECONDS, FINISH_SECONDS = 30, 120  # an unreachable server costs this much and no more
SERVERS = ("https://api.wandb.ai", "https://api.forge.coreweave.com")  # the same, by its old and its new name


class Wandb:
    """A run of wandb. Asked for online, but without credentials or without an answer, it goes on offline.

    Args:
        folder: the run's folder; wandb's own is below it, and the run's id, by which a resumed run continues.
        name: of the run.
        project: of wandb.
        online: whether to send to the server while the run goes on.
        warn: says one line.
    """

    def __init__(self, folder: Path, name: str, project: str, online: bool, warn: Callable[[str], None]):
        self._names: dict[str, Any] = {"project": project, "name": name, "id": run_id(folder), "dir": str(folder)}
        self._folder = folder / FOLDER
        if online and not has_credentials(os.environ):
            warn("wandb: online needs an API key (WANDB_API_KEY or `wandb login`), and there is none: goes on offline")
            online = False
        self._run = self._start_online(warn) if online else self._start("offline")
        self._run.define_metric("*", step_metric="step")  # a resumed run may log steps again, which wandb's own refuses

    def _start_online(self, warn: Callable[[str], None]) -> Any:
        """A run on the server; offline where the server gives none."""
        try:
            return self._start("online")
        except Exception as error:
            import wandb

            wandb.teardown()  # it keeps the id of the run that did not start
            reason = " ".join(str(error).split())[:300]
            warn(f"wandb: the server gave no run ({type(error).__name__}: {reason}): goes on offline")
            return self._start("offline")

    def _start(self, mode: Literal["online", "offline"]) -> Any:
        with own_folders(self._folder):
            import wandb

            settings = wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,  # a remote's URL may hold a password
                disable_code=True,
                save_code=False,
                login_timeout=1,
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
            )
            return wandb.init(mode=mode, resume="allow", settings=settings, **self._names)

    @property
    def place(self) -> str:
        """The run's page, or the command that sends it there."""
        return (None if self._run.offline else self._run.url) or f"wandb sync {self._folder}/offline-run-*"

    def config(self, values: Json) -> None:
        """Log the run's configuration; a resumed run may have changed it."""
        self._run.config.update(values, allow_val_change=True)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log numbers at a step."""
        self._run.log({"step": step, **values})

    def picture(self, step: int, name: str, image: Image) -> None:
        """Log a picture at a step."""
        import wandb

        self._run.log({"step": step, name: wandb.Image(image)})

    def summary(self, values: Json) -> None:
        """Log what the run was."""
        self._run.summary.update(values)

    def report(self, file: Path) -> None:
        """Log the run's report as it is."""
        import wandb

        self._run.log({"report": wandb.Html(str(file), inject=False)})

    def close(self, failed: bool) -> None:
        """Send what is left, for at most ``FINISH_SECONDS``."""
        self._run.finish(exit_code=1 if failed else 0)


def run_id(folder: Path) -> str:
    """The id of a run's twin in wandb: made once, kept in the run's folder."""
    file = folder / FOLDER / ID
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4))
    return file.read_text().strip()


def has_credentials(environment: Mapping[str, str]) -> bool:
    """Whether wandb can log in without asking: a key or token file in the environment, or the server's netrc entry."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = environment.get("NETRC")
    home = Path(environment.get("HOME") or Path.home())
    asked = environment.get("WANDB_BASE_URL")
    hosts = [urlsplit(server).netloc for server in ([asked] if asked else SERVERS)]
    for file in [Path(named).expanduser()] if named else [home / ".netrc", home / "_netrc"]:
        try:
            entries = netrc.netrc(file).hosts
        except (OSError, netrc.NetrcParseError):
            continue
        if any(entries[host][2] for host in hosts if host in entries):
            return True
    return False


@contextmanager
def own_folders(folder: Path) -> Iterator[None]:
    """While wandb starts, its caches and logs are the run's too, unless the user has put them elsewhere."""
    wanted = {"WANDB_CACHE_DIR": folder / "cache", "WANDB_DATA_DIR": folder / "data"}
    ours = [name for name in wanted if name not in os.environ]
    os.environ.update({name: str(wanted[name].resolve()) for name in ours})
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
