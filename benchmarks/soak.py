"""A long run of a tiny model, watched for what grows (``make soak``).

    python -m benchmarks.soak [--steps N] [--out FOLDER] [--folder FOLDER [--minutes N]]

Trains with blocks streamed from the host, validation, checkpoints and two buckets, while ``simpletune web`` shows the
run to a browser that stays open. At twenty points it looks at both processes and at what they write. Fails if memory,
descriptors, threads, the page or the report grow from the second quarter of the run to the last. With ``--folder``
the run is kept, and the next call continues it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

import psutil

from benchmarks.table import listed, table
from benchmarks.tiny_models import tiny_sd3
from simpletune.apps.web.run_page import PARTS
from simpletune.apps.web.run_state import last_row
from simpletune.data.demo import demo_scenes
from simpletune.runs.folder import METRICS, SUMMARY, read_rows
from simpletune.system.atomic import write_json
from simpletune.system.environment import describe_machine
from simpletune.system.options import Json, UserError

OUT = Path("benchmarks/results/cpu")
NAME = "soak"
POINTS = 20
VALIDATIONS = 160  # more than the page shows
PERIOD = 2.0  # seconds between two looks at the processes
STARTS = 600.0  # seconds that the server may take, on a machine that does much else
# glibc returns freed memory late, by a threshold that it raises to 64 MiB by itself: growth that is none.
RETURNED = {"MALLOC_TRIM_THRESHOLD_": str(128 * 1024)}
MIB = 2**20
MODEL = tiny_sd3.Sizes(layers=2, heads=2, vae_channels=(8, 8, 8, 8), clip_widths=(16, 16), t5_width=32)
OPTIONS: Json = {
    "name": NAME,
    "device": "cpu",
    "model": {"t5_length": 8},
    "data": {"resolution": 32, "aspect": "buckets", "caption_dropout": 0.1},
    "adapter": {"method": "lora", "rank": 4},
    "precision": {"weights": "int8", "compute": "fp32"},
    "optimizer": {"name": "adamw", "lr": 0.0001},
    "train": {"batch_size": 1},
    "memory": {"checkpointing": "all", "resident_blocks": 1},
    "checkpoint": {"keep_last": 2},
    "validation": {"prompts": ["a red disc", "a blue cross"], "steps": 2, "loss_samples": 4},
    "profile": {"max_traces": 1},
    "tracking": {"tensorboard": True},
}


@dataclass
class Watched:
    """What a process took between two points."""

    rss_mib: float = 0.0
    """At least: what it holds while it trains or waits."""
    most_mib: float = 0.0
    """At most: while it validates or saves."""
    descriptors: int = 0
    """At most, as threads."""
    threads: int = 0

    def look(self, process: psutil.Process) -> None:
        """Look at a process, if it still runs."""
        try:
            with process.oneshot():
                now = round(process.memory_info().rss / MIB, 1)
                self.rss_mib = min(self.rss_mib or now, now)
                self.descriptors = max(self.descriptors, process.num_fds())
                self.threads = max(self.threads, process.num_threads())
        except psutil.NoSuchProcess:
            pass

    def look_back(self, process: psutil.Process) -> None:
        """Read the most memory since the last call, which Linux keeps for each process until it is told to forget."""
        place = Path("/proc", str(process.pid))
        found = re.search(r"VmHWM:\s+(\d+) kB", (place / "status").read_text())
        assert found is not None
        self.most_mib = round(int(found[1]) / 1024, 1)
        (place / "clear_refs").write_text("5")


@dataclass
class Point:
    """What was seen at one of the points, and since the one before."""

    step: int
    seconds: float
    """Of a step, processor time."""
    train: Watched
    web: Watched
    page: dict[str, int]
    """Bytes of the run's page and of its parts."""
    report: int
    """Bytes of its report."""
    metrics: float
    """Bytes of metrics.jsonl, by step."""
    folder: float
    """Bytes of the rest of the run's folder, by step."""
    start: int = 0
    """The step from which its processes ran: above 0 where a run was continued."""

    @classmethod
    def of(cls, row: Json) -> Point:
        """Read a point that was written."""
        return cls(**row | {who: Watched(**row[who]) for who in ("train", "web")})


GROWTH: dict[str, tuple[str, Callable[[Point], float], float, float]] = {
    "step": ("a step, ms of processor time", lambda p: 1000 * p.seconds, 0, 0.25),
    "memory": ("training, MiB", lambda p: p.train.rss_mib, 8.0, 0.0),  # one of two levels, 6.6 MiB apart
    "most memory": ("at most", lambda p: p.train.most_mib, 16.0, 0.0),
    "descriptors": ("training, descriptors", lambda p: p.train.descriptors, 1, 0),
    "threads": ("training, threads", lambda p: p.train.threads, 0, 0),
    "web memory": ("web, MiB", lambda p: p.web.rss_mib, 4.0, 0.0),
    "most web memory": ("at most", lambda p: p.web.most_mib, 8.0, 0.0),
    "web descriptors": ("web, descriptors", lambda p: p.web.descriptors, 1, 0),
    "web threads": ("web, threads", lambda p: p.web.threads, 1, 0),
    "page": ("page, KiB", lambda p: sum(p.page.values()) / 1024, 4.0, 0.05),
    "report": ("report, KiB", lambda p: p.report / 1024, 4.0, 0.05),
    "metrics": ("metrics, bytes a step", lambda p: p.metrics, 1.0, 0.05),
    "folder": ("rest of the run's folder, bytes a step", lambda p: p.folder, 1.0, 0.05),
}
"""What must not grow: its name, its figure, and how much of it may: a number and a share."""
FILES = ("page", "report", "metrics", "folder")
"""Those that last when a run is continued by new processes."""


@dataclass
class Soak:
    """A run that is watched."""

    folder: Path
    steps: int
    points: list[Point] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / NAME

    @property
    def parts(self) -> list[list[Point]]:
        """The points, by the processes that they were seen in."""
        return [list(part) for _, part in groupby(self.points, key=lambda point: point.start)]

    def write_inputs(self) -> Path:
        """Write the model, pictures of two shapes, and the configuration, unless an earlier call did.

        Raises:
            UserError: the folder holds a run of another length.
        """
        if (config := self.folder / "soak.json").exists():
            if (steps := json.loads(config.read_text())["train"]["steps"]) != self.steps:
                raise UserError(f"{self.folder} holds a run of {steps:,} steps, not {self.steps:,}. Use another folder")
            return config
        tiny_sd3.build(self.folder / "model", MODEL, seed=1, dtype="fp32")
        pictures = self.folder / "pictures"
        demo_scenes.write_folder(pictures, demo_scenes.sample_scenes(12, seed=3), seed=3, pixels=64)
        from PIL import Image

        for file in sorted(pictures.glob("*.png"))[::2]:  # the others stay square
            with Image.open(file) as image:
                image.crop((0, 0, 64, 32)).resize((96, 48)).save(file)
        every = max(1, self.steps // VALIDATIONS)
        options = json.loads(json.dumps(OPTIONS))
        options["model"]["pretrained"] = str(self.folder / "model")
        options["data"]["path"] = str(pictures)
        options["train"]["steps"] = self.steps
        options["checkpoint"]["every"] = options["validation"]["every"] = every
        options["output"] = {name: str(self.folder / name) for name in ("runs", "profiles", "cache")}
        write_json(config, options)
        return config

    def watch(self, minutes: float = math.inf) -> bool:
        """Train and look, and continue what an earlier call began; False if the time is over before the run.

        Raises:
            RuntimeError: the run fails.
        """
        until = time.monotonic() + 60 * minutes
        config, begun, since = self.write_inputs(), self.step(), (0, 0.0)
        seen_before = self.folder / "points.jsonl"
        self.points = [Point.of(row) for row in read_rows(seen_before)]
        with ExitStack() as stack:
            serves = stack.enter_context(
                started("web", "--runs", str(self.run.parent), "--port", "0", log=self.folder / "web.log")
            )
            browser = stack.enter_context(Browser(self.folder / "web.log"))
            trains = stack.enter_context(
                started("train", str(config), "--resume", "auto", log=self.folder / "train.log")
            )
            training, serving = psutil.Process(trains.pid), psutil.Process(serves.pid)
            seen = Watched(), Watched()
            while trains.poll() is None:
                if time.monotonic() > until:
                    return False
                for process, watched in zip((training, serving), seen, strict=True):
                    watched.look(process)
                step, used = self.step(), sum(training.cpu_times()[:2])
                last = self.points[-1].step if self.points else 0
                if not since[0] and step > begun:  # the start is no step
                    since = step, used
                elif since[0] and step - last >= self.steps / POINTS and since[0] < step < self.steps:
                    for process, watched in zip((training, serving), seen, strict=True):
                        watched.look_back(process)
                    seconds = (used - since[1]) / (step - since[0])
                    self.points.append(self._point(step, seconds, seen, browser, begun))
                    with seen_before.open("a") as file:
                        file.write(json.dumps(asdict(self.points[-1])) + "\n")
                    seen, since = (Watched(), Watched()), (step, used)
                time.sleep(min(PERIOD, self.steps / POINTS / 100))
            if trains.returncode or not (self.run / SUMMARY).exists():
                raise RuntimeError(f"the run ended with {trains.returncode}: {(self.folder / 'train.log').read_text()}")
        return True

    def step(self) -> int:
        """Return the last step that was recorded."""
        return int(last_row(self.run / METRICS).get("step", 0))

    def _point(self, step: int, seconds: float, seen: tuple[Watched, Watched], browser: Browser, start: int) -> Point:
        report = self.folder / "report.html"
        subprocess.run([sys.executable, "-m", "simpletune", "report", str(self.run), "--out", str(report)], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        metrics = (self.run / METRICS).stat().st_size
        files = [file for file in self.run.rglob("*") if file.is_file() and not file.is_symlink()]
        rest = sum(size_of(file) for file in files) - metrics
        point = Point(step, seconds, *seen, browser.page(), report.stat().st_size, metrics / step, rest / step, start)
        print(json.dumps(asdict(point)), flush=True)
        return point

    def grown(self) -> list[str]:
        """Name what grew from the second quarter to the last; what processes take, while the same ones ran."""
        same = max(self.parts, key=len, default=[])
        if len(same) < 4:
            return [f"only {len(same)} points were seen, too few to tell: use more steps"]
        found = []
        for what, (_, figure, more, share) in GROWTH.items():
            points = self.points if what in FILES else same
            quarter = len(points) // 4
            before = max(figure(point) for point in points[quarter : 2 * quarter])
            after = max(figure(point) for point in points[-quarter:])
            if after > before + max(more, share * before):
                found.append(f"{what}: from {before:,.1f} to {after:,.1f}")
        return found


def size_of(file: Path) -> int:
    """Bytes of a file; 0 if it was removed meanwhile."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def started(*words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A verb of simpletune in a process of its own, which is ended with the context."""
    with log.open("wb") as file:
        command = [sys.executable, "-m", "simpletune", *words]
        process = subprocess.Popen(command, cwd=log.parent, env=os.environ | RETURNED, stdout=file, stderr=file)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(300)


class Browser:
    """What an open page asks of the server: the stream of events, and the page with its parts."""

    def __init__(self, log: Path):
        self._log = log

    def __enter__(self) -> Browser:
        until = time.monotonic() + STARTS
        while not (found := re.search(r"http://([\d.]+):(\d+)", self._log.read_text())):
            if time.monotonic() > until:
                raise RuntimeError(f"the page's server does not answer: {self._log.read_text()}")
            time.sleep(0.2)
        self._address = found[1], int(found[2])
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """The stream ends with the server."""

    def _listen(self) -> None:
        for _ in self._open("/events"):
            pass

    def _open(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(*self._address, timeout=60)
        connection.request("GET", path)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status}")
        return response

    def page(self) -> dict[str, int]:
        """Load the run's page and its parts; their bytes."""
        return {part: len(self._open(f"/run/{NAME}/{part}".rstrip("/")).read()) for part in ("", *PARTS)}


def page_of(soak: Soak, began: float) -> str:
    """The table as Markdown."""
    columns = {"": "step"} | {what: title for what, (title, *_) in GROWTH.items()}
    rows = {}
    for point in soak.points:
        figures = {what: float(figure(point)) for what, (_, figure, *_) in GROWTH.items()}
        rows[f"{point.step:,}"] = {what: f"{value:,.0f}" for what, value in figures.items()}
    grown = soak.grown()
    verdict = "Grown from the second quarter to the last: " + "; ".join(grown) if grown else "Nothing has grown."
    starts = [f"{part[0].start:,}" for part in soak.parts[1:]]
    if starts:
        verdict += f" Continued at step {', '.join(starts)}: processes are compared in the longest part."
    took = {"time": f"{(time.monotonic() - began) / 60:.0f} min"} if not starts else {}
    lines = ["# A long run", "", ABOUT, "", *listed("make soak", describe_machine() | took), "", verdict]
    return "\n".join([*lines, "", *table(columns, rows)]) + "\n"


ABOUT = f"""\
A tiny SD3 of two blocks trains, one of which is streamed from the host for every pass, on 12 pictures in two buckets.
It validates and saves {VALIDATIONS} times, with loss and pictures, and writes TensorBoard's file and one trace. Beside
it `simpletune web` shows the run to a browser that stays open, and `simpletune report` writes its report at each of
these points. Memory is the least that was seen since the point before, every {PERIOD:g} s, and beside it the most that
Linux noted; descriptors and threads are the most seen. glibc gives freed memory back at once
(`MALLOC_TRIM_THRESHOLD_`); otherwise it keeps up to 64 MiB. The page has all of its parts. Its charts halve their
points again and again, so that it is a saw."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="length of the run (default: 20,000)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the page (default: {OUT})")
    parser.add_argument("--folder", type=Path, help="keep the run there, or continue the one that is there")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then; the same command continues")
    args = parser.parse_args(argv)
    if args.folder is None and args.minutes < math.inf:
        parser.error("--minutes needs --folder, where the run is kept")
    began = time.monotonic()
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder.resolve(), args.steps)
        try:
            ended = soak.watch(args.minutes)
        except UserError as error:
            parser.error(str(error))
        if not ended:
            print(f"stopped at step {soak.step():,} of {args.steps:,}; the same command continues")
            return 1
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "soak.md").write_text(page_of(soak, began), encoding="utf-8")
    print("\n".join(soak.grown()) or "nothing has grown")
    return int(bool(soak.grown()))


if __name__ == "__main__":
    sys.exit(main())
