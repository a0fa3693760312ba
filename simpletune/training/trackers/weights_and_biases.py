"""Log to wandb, online or offline. All of its files are in the run's folder, and it never prompts for input."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from simpletune.system.options import Json
from simpletune.system.printable import describe_exception

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER, ID = "wandb", "run_id"
INIT_SECONDS, FINISH_SECONDS = 30, 120  # limits for an unreachable server
SERVERS = ("https://api.wandb.ai", "https://api.forge.coreweave.com")  # old and new name of one server


class Wandb:
    """Log a run to wandb. Without credentials or without an answer, an online run continues offline.

    Args:
        folder: run folder; contains wandb's folder with the run's id, with which a resumed run continues.
        name: name of the run.
        project: wandb project.
        online: upload during the run.
        config: the run's configuration.
        warn: prints a warning.
    """

    def __init__(self, folder: Path, name: str, project: str, online: bool, config: Json, warn: Callable[[str], None]):
        self._names: dict[str, Any] = {"project": project, "name": name, "id": run_id(folder), "dir": str(folder)}
        self._folder = folder / FOLDER
        self._run: Any = None
        if online and has_credentials(os.environ):
            try:
                self._run = self._start("online")
            except Exception as error:
                import wandb

                wandb.teardown()  # otherwise wandb keeps the id of the run that did not start
                warn(f"wandb: continues offline, because the server started no run ({describe_exception(error)})")
        elif online:
            warn("wandb: continues offline, because online needs an API key (WANDB_API_KEY or `wandb login`)")
        if self._run is None:
            self._run = self._start("offline")
        self._run.define_metric("*", step_metric="step")  # a resumed run may repeat steps; wandb's own counter cannot
        self._run.config.update(config, allow_val_change=True)  # which a resumed run may have changed

    def _start(self, mode: Literal["online", "offline"]) -> Any:
        with own_folders(self._folder):
            import wandb

            settings = wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,  # a remote's URL may contain a password
                disable_code=True,
                save_code=False,
                login_timeout=1,
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
            )
            return wandb.init(mode=mode, resume="allow", settings=settings, **self._names)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def image(self, step: int, name: str, image: Image) -> None:
        import wandb

        self._run.log({"step": step, name: wandb.Image(image)})

    def report(self, file: Path) -> None:
        import wandb

        self._run.log({"report": wandb.Html(str(file), inject=False)})

    def summary(self, values: Json) -> str:
        self._run.summary.update(values)
        if not self._run.offline and self._run.url:
            return str(self._run.url)
        if not any(self._folder.glob("offline-run-*")):
            return f"nothing is kept: wandb is off (WANDB_MODE={os.environ.get('WANDB_MODE', '')})"
        return f"wandb sync {self._folder}/offline-run-*"

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)  # uploads the rest, for at most FINISH_SECONDS


def run_id(folder: Path) -> str:
    """Return the run's id in wandb, created once and stored in the run's folder."""
    file = folder / FOLDER / ID
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4), encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def has_credentials(environment: Mapping[str, str]) -> bool:
    """Return whether wandb can log in without a prompt: by a key or token file in the environment, or by netrc."""
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
    """Put wandb's caches and logs into the run's folder while it starts, unless the user has set their location."""
    wanted = {"WANDB_CACHE_DIR": folder / "cache", "WANDB_DATA_DIR": folder / "data"}
    ours = [name for name in wanted if name not in os.environ]
    os.environ.update({name: str(wanted[name].resolve()) for name in ours})
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
