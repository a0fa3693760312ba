"""The live line: predictions by ``estimate`` in a child process, one at a time, cached in ``runs/.web/estimates``."""

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
from simpletune.system.console import duration
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
    sources = [file_stamp(Path(source.path)) for source in config.sources]
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
        self._running: tuple[str, str] | None = None  # form, key
        self._progress: tuple[float, str, float] | None = None  # of the running one: share, part, seconds left
        self._predictor: subprocess.Popen[str] | None = None  # stays for the next request
        self._thread: threading.Thread | None = None

    def progress(self, key: str) -> Json | None:
        """Return how far the prediction of a key is: the share done, the part in words, the time left in words; None if
        it is not running, or has not said yet."""
        with self._lock:
            if self._running is None or self._running[1] != key or self._progress is None:
                return None
            share, part, left = self._progress
        return {"share": round(share, 2), "words": part, "left": duration(left)}

    def want(self, form: str, request: EstimateRequest) -> None:
        """Predict for a form, and drop what it wanted before."""
        with self._lock:
            self._waiting.pop(form, None)
            running = self._running
            if running is not None and running[1] == request.key:
                return
            if running is not None and running[0] == form and self._predictor is not None:
                self._predictor.kill()
                self._predictor = None
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
            if _file(self.roots, request.key).exists():
                return True
            predictor = self._begin(request)
            self._running, self._progress = (form, request.key), None
        self._finish(request, predictor)
        return True

    def _begin(self, request: EstimateRequest) -> subprocess.Popen[str]:
        """Hand a request to the predictor that waits for one, or to a new one."""
        (self.roots.own / FOLDER).mkdir(parents=True, exist_ok=True)
        config = self._config(request)
        write_json(config, request.data)
        words = ["estimate", str(config), "--json", *(["--device", request.device] if request.device else [])]
        old = self._predictor
        if old is None or old.poll() is not None or not _ask(old, words):  # it may end while it is asked
            pipe = subprocess.PIPE
            module = "simpletune.apps.web.predictor"
            self._predictor = old = processes.spawn(self.roots, module, [], text=True, stdin=pipe, stdout=pipe)
            _ask(old, words)
        return old

    def _config(self, request: EstimateRequest) -> Path:
        """Write a request's configuration to a file: this page's own, since it is removed at the end."""
        return self.roots.own / FOLDER / f"{request.key}.{machine_name()}-{os.getpid()}.config.json"

    def _finish(self, request: EstimateRequest, predictor: subprocess.Popen[str]) -> None:
        """Follow a request to its end, and cache the answer."""
        answer: Json | None = None
        assert predictor.stdout is not None
        while answer is None and (line := predictor.stdout.readline()).endswith("\n"):  # not cut off by its end
            said = json.loads(line)
            if isinstance(said, dict):
                answer = said
            else:
                with self._lock:
                    self._progress = tuple(said)
        with self._lock:
            dropped = answer is None and self._predictor is not predictor  # for a newer request
            if answer is None and not dropped and predictor.wait() == 0:  # had just ended for want of work
                again = self._begin(request)
            else:
                again, self._running, self._progress = None, None, None
        if again is not None:
            self._finish(request, again)
            return
        folder = self.roots.own / FOLDER
        self._config(request).unlink(missing_ok=True)
        if dropped:
            predictor.wait()
            return
        if answer is None:
            found: Json = {"error": f"estimate ended with code {predictor.wait()}"}
        elif answer["code"] == 0:
            found = json.loads(answer["out"][answer["out"].index("{") :])
        else:
            lines = [line for line in answer["err"].splitlines() if line.strip()]
            at = next((at for at, line in enumerate(lines) if line.startswith("error: ")), max(0, len(lines) - 1))
            words = "\n".join(lines[at:]).removeprefix("error: ")[:2000]
            found = {"error": words or f"estimate ended with code {answer['code']}"}
        write_json(_file(self.roots, request.key), found, shared=True)
        for old in sorted(folder.glob("*.json"), key=lambda file: file_stamp(file) or (0, 0))[:-KEPT]:
            old.unlink(missing_ok=True)


def _ask(predictor: subprocess.Popen[str], words: list[str]) -> bool:
    """Write a request to a predictor; False if it has ended."""
    assert predictor.stdin is not None
    try:
        print(json.dumps(words), file=predictor.stdin, flush=True)
    except BrokenPipeError:
        return False
    return True


estimator = cache(Estimator)  # one for each page's roots


def _file(roots: Roots, key: str) -> Path:
    return roots.own / FOLDER / f"{key}.json"
