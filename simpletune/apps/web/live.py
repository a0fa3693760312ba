"""The live line: predictions by ``estimate`` in child processes, one at a time, cached in ``runs/.web/estimates``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from simpletune import __version__
from simpletune.apps.web import processes
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import file_stamp
from simpletune.config.load import MODEL_PARTS
from simpletune.config.schema import TrainConfig
from simpletune.estimate.estimate_command import shipped_json
from simpletune.estimate.stored import versions
from simpletune.runs.folder import read_json_or_none
from simpletune.system.atomic import machine_name, write_json
from simpletune.system.gpus import Card
from simpletune.system.options import Json

FOLDER, SHIPPED = "estimates", ".shipped"
IRRELEVANT = {"name", "about", "output", "tracking", "profile", "schema_"}  # to what is shown
MOST = 32  # forms that wait for a prediction
KEPT = 2000  # predictions


@dataclass(frozen=True)
class EstimateRequest:
    """A prediction that a form is waiting for."""

    key: str  # equal for equal predictions
    data: Json  # the configuration
    device: str | None  # the card's name or memory; None: no card


def estimate_request(config: TrainConfig, data: Json, card: Card | None) -> EstimateRequest:
    """Describe what to predict for a validated configuration, its JSON and the card to train on."""
    device = None if card is None else f"{card.gib:.2f}GiB" if card.found == 1.0 else card.name
    options = config.model_dump(mode="json", by_alias=True, exclude=IRRELEVANT)
    sources = [file_stamp(Path(source.path)) for source in config.data.members]
    about = [options, device, sources, __version__, versions()]
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    return EstimateRequest(key, data, device)


def cached_estimate(roots: Roots, key: str) -> Json | None:
    """Return a cached prediction: ``estimate --json``'s output, or ``{"error": words}``; None if there is none."""
    return read_json_or_none(_file(roots, key)) if re.fullmatch(f"[0-9a-f]{{24}}({SHIPPED})?", key) else None


def keep_shipped(roots: Roots, key: str, config: TrainConfig, card: Card | None) -> None:
    """Keep the prediction that ships for other versions of the libraries, if any, as that of ``key + SHIPPED``."""
    parts = [part for name in MODEL_PARTS if (part := getattr(config.model, name, None)) is not None]
    known = all(str(part).startswith("demo:") or config.model.files.bundled_config(str(part)) for part in parts)
    if not known or _file(roots, key + SHIPPED).exists():
        return  # another model's configuration would have to be read, perhaps from the hub
    if (found := shipped_json(config, card)) is not None:
        (roots.own / FOLDER).mkdir(parents=True, exist_ok=True)
        write_json(_file(roots, key + SHIPPED), found, shared=True)


class Estimator:
    """Predict for one page's open forms; a form's newest request replaces its older ones."""

    def __init__(self, roots: Roots):
        self.roots = roots
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, EstimateRequest] = OrderedDict()
        self._running: tuple[str, str, subprocess.Popen[str]] | None = None  # form, key, process
        self._thread: threading.Thread | None = None

    def want(self, form: str, request: EstimateRequest) -> None:
        """Predict for a form, and drop what it wanted before."""
        with self._lock:
            self._waiting.pop(form, None)
            running = self._running
            if running is not None and running[1] == request.key:
                return
            if running is not None and running[0] == form:
                running[2].kill()
            self._waiting[form] = request
            while len(self._waiting) > MOST:
                self._waiting.popitem(last=False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()

    def _work(self) -> None:
        try:
            while self._predict_next():
                pass
        except BaseException:  # such as a full disk: the next request starts another thread
            with self._lock:
                self._thread = self._running = None
            raise

    def _predict_next(self) -> bool:
        """Predict for the form that asked last; False if none is waiting, which ends the thread."""
        with self._lock:
            if not self._waiting:
                self._thread = None
                return False
            form, request = self._waiting.popitem()
            process = None if _file(self.roots, request.key).exists() else self._begin(request)
            self._running = None if process is None else (form, request.key, process)
        if process is not None:
            self._finish(request, process)
        return True

    def _begin(self, request: EstimateRequest) -> subprocess.Popen[str]:
        folder = self.roots.own / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        config = self._config(request)
        write_json(config, request.data)
        words = ["estimate", str(config), "--json", *(["--device", request.device] if request.device else [])]
        pipe = subprocess.PIPE
        return processes.spawn(self.roots, "simpletune", words, text=True, stdout=pipe, stderr=pipe)

    def _config(self, request: EstimateRequest) -> Path:
        """Write a request's configuration to a file: this page's own, since it is removed at the end."""
        return self.roots.own / FOLDER / f"{request.key}.{machine_name()}-{os.getpid()}.config.json"

    def _finish(self, request: EstimateRequest, process: subprocess.Popen[str]) -> None:
        out, err = process.communicate()
        with self._lock:
            self._running = None
        folder, code = self.roots.own / FOLDER, process.returncode
        self._config(request).unlink(missing_ok=True)
        if code < 0:  # dropped for a newer request
            return
        if code == 0:
            found: Json = json.loads(out[out.index("{") :])
        else:
            lines = [line for line in err.splitlines() if line.strip()]
            at = next((at for at, line in enumerate(lines) if line.startswith("error: ")), max(0, len(lines) - 1))
            said = "\n".join(lines[at:]).removeprefix("error: ")[:2000]
            found = {"error": said or f"estimate ended with code {code}"}
        write_json(_file(self.roots, request.key), found, shared=True)
        for old in sorted(folder.glob("*.json"), key=lambda file: file_stamp(file) or (0, 0))[:-KEPT]:
            old.unlink(missing_ok=True)


estimator = cache(Estimator)  # one for each page's roots


def _file(roots: Roots, key: str) -> Path:
    return roots.own / FOLDER / f"{key}.json"
