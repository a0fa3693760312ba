"""``make compare BASE=COMMIT``: short trainings by two trees on this machine, equal to the bit or not.

Both trees run the same rows (``compare_rows.py``) through their command lines at the same time, one process each, with
one thread; only files of the runs are read. A row of a member that the older tree lacks, such as a model family, is
skipped, and named. A row is equal if every number of its metrics, except times, every tensor
of every safetensors file and every pixel of every picture is. A row that either tree refuses or fails counts as
different, and so does a choice of the newer tree's configuration that no row makes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from PIL import Image

from benchmarks.compare_rows import (
    INPUTS,
    PROMPT,
    Json,
    Row,
    older_path,
    rows,
    translate,
    translate_words,
    unknown_members,
    without_row,
)

ROOT = Path(__file__).resolve().parent.parent
METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
TIMES = {"seconds"}  # columns of the metrics that no two runs share
COMPARED = (".safetensors", ".png")
PATIENCE = 300  # seconds that a command may take
NOT_HANDED_ON = ("PYTEST", "GIT_", "COV_", "SIMPLETUNE_", "PYTHON", "WORLD_SIZE", "RANK", "LOCAL_", "MASTER_")


@dataclass(frozen=True)
class Comparison:
    """How two runs of a row differ.

    Args:
        steps: that both logged.
        first: loss of the newer tree's first step.
        last: and of its last.
        tensors: compared, in all files.
        files: compared: weights, checkpoints and pictures.
        losses: the first difference of the metrics, or nothing.
        weights: the first difference of tensors or pictures, or nothing.
        failure: why nothing was compared, or nothing.
        seconds: what the older and the newer tree took.
    """

    steps: int = 0
    first: str = ""
    last: str = ""
    tensors: int = 0
    files: int = 0
    losses: str = ""
    weights: str = ""
    failure: str = ""
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def equal(self) -> bool:
        """Whether something was compared, and nothing differs."""
        return not (self.failure or self.losses or self.weights) and self.steps > 0 and self.tensors > 0


def compare_runs(base: Path, new: Path, seconds: tuple[float, float] = (0.0, 0.0)) -> Comparison:
    """Compare what two runs have left.

    Args:
        base: folder of the older tree's run.
        new: of the newer tree's.
        seconds: what they took.
    """
    logged = _metrics(new / METRICS)
    losses = _metrics_difference(base / older_path(Path(METRICS)), new / METRICS) or _metrics_difference(
        base / older_path(Path(EVALUATIONS)), new / EVALUATIONS
    )
    tensors, files, weights = _file_differences(base, new)
    first, last = (logged[step].get("loss", "") for step in (0, -1)) if logged else ("", "")
    nothing = "" if logged and tensors else f"nothing to compare: {len(logged)} steps, {tensors} tensors"
    return Comparison(len(logged), first, last, tensors, files, losses, weights, nothing, seconds)


def _metrics(file: Path) -> list[dict[str, str]]:
    """The rows of a log, numbers as they are written, times left out."""
    if not file.exists():
        return []
    read = functools.partial(json.loads, parse_float=str, parse_int=str, parse_constant=str)
    lines = (read(line) for line in file.read_text().splitlines())
    return [{name: str(value) for name, value in row.items() if name not in TIMES} for row in lines]


def _metrics_difference(base: Path, new: Path) -> str:
    """Where two logs first differ."""
    theirs, ours = _metrics(base), _metrics(new)
    for old, now in zip(theirs, ours, strict=False):
        for name in dict.fromkeys([*now, *old]):
            if old.get(name) != now.get(name):
                step = f"step {now.get('step', old.get('step', '?'))}"
                return f"{step}: {name} {old.get(name, 'missing')}, now {now.get(name, 'missing')}"
    return "" if len(theirs) == len(ours) else f"{new.name}: {len(theirs)} rows, now {len(ours)}"


def _compared_files(run: Path) -> set[Path]:
    return {file.relative_to(run) for file in run.rglob("*") if file.suffix in COMPARED}


def _file_differences(base: Path, new: Path) -> tuple[int, int, str]:
    """The number of tensors and of files that both runs have, and the first difference."""
    ours, theirs = {older_path(file): file for file in _compared_files(new)}, _compared_files(base)
    found = [f"{file}: {'only in the base' if file in theirs else 'new'}" for file in sorted(theirs ^ set(ours))]
    tensors = 0
    for file in sorted(theirs & set(ours)):
        if file.suffix == ".png":
            same = read_pixels(base / file) == read_pixels(new / ours[file])
            found += [] if same else [f"{file}: pixels differ"]
        else:
            count, difference = _tensor_difference(base / file, new / ours[file])
            tensors += count
            found += [f"{file}: {difference}"] if difference else []
    more = f" (and {len(found) - 1} more files)" if len(found) > 1 else ""
    return tensors, len(theirs & set(ours)), f"{found[0]}{more}" if found else ""


def read_pixels(file: Path) -> tuple[str, tuple[int, int], bytes]:
    with Image.open(file) as image:
        return image.mode, image.size, image.tobytes()


def read_tensors(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes of every tensor of a safetensors file, by name; the file's metadata is left out."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (about["dtype"], about["shape"], data[start + begin : start + end])
        for name, about in header.items()
        for begin, end in [about["data_offsets"]]
    }


def _tensor_difference(base: Path, new: Path) -> tuple[int, str]:
    """How many tensors two files share, and the first difference of names, types, shapes and bits."""
    theirs, ours = read_tensors(base), read_tensors(new)
    shared = theirs.keys() & ours.keys()
    for name in sorted(theirs.keys() ^ ours.keys()):
        return len(shared), f"{name} is {'missing' if name in theirs else 'new'}"
    for name in sorted(shared):
        (kind, shape, old), (new_kind, new_shape, now) = theirs[name], ours[name]
        if (kind, shape) != (new_kind, new_shape):
            return len(shared), f"{name} {kind} {shape}, now {new_kind} {new_shape}"
        if old != now:
            at = next(index for index, pair in enumerate(zip(old, now, strict=True)) if pair[0] != pair[1])
            return len(shared), f"{name} {kind} {shape} differs from byte {at} on"
    return len(shared), ""


class Tree:
    """One of the two trees: its command line, and a process that runs rows of it.

    Args:
        code: the tree.
        place: a folder for what its runs write.
        older: whether names are translated.
    """

    def __init__(self, code: Path, place: Path, older: bool):
        self.code, self.place, self.older = code, place, older
        place.mkdir()
        (place / "temporary").mkdir()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(NOT_HANDED_ON)}
        self.environment |= {
            "PYTHONPATH": str(code), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(place / "temporary"), "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error",
        }  # fmt: skip
        self.knows = functools.cache(self._knows)
        printed = self.run(self.words("schema"))
        if printed.returncode:
            raise SystemExit(f"compare: {code} prints no schema: {printed.stderr.strip()}")
        self.schema: Json = json.loads(printed.stdout)

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run the command line in a process of its own."""
        command = [sys.executable, "-m", "simpletune", *words]
        return subprocess.run(command, cwd=self.place, env=self.environment, capture_output=True, text=True)

    def _knows(self, verb: str, flag: str) -> bool:
        """Whether the command line has a verb, or a verb has a flag."""
        asked = self.run([verb, "--help"])
        return asked.returncode == 0 and (not flag or flag in asked.stdout.replace(",", " ").split())

    def words(self, *words: str) -> list[str]:
        """A command line in the tree's own words."""
        return translate_words(list(words), self.knows) if self.older else list(words)

    @contextmanager
    def started(self) -> Iterator[None]:
        """Start the process that runs rows, and end it."""
        driver = ROOT / "benchmarks" / "compare_driver.py"
        command = [sys.executable, "-P", str(driver), str(self.code)]
        start = functools.partial(subprocess.Popen[str], cwd=self.place, env=self.environment, text=True)
        with open(self.place / "driver.log", "w") as log:
            self.driver = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
            try:
                yield
            finally:
                self.driver.communicate()

    def begin(self, name: str, row: Row, inputs: Path) -> None:
        """Have a row run."""
        train = self.words("train", self._config(name, row.config, inputs))
        commands = [train]
        if row.resumes:
            half = row.config | {"train": halved(row.config["train"])}
            train = self.words("train", train[1], "--resume", "latest")
            commands = [self.words("train", self._config(name, half, inputs, "-half")), train]
        if row.draws:
            drawn = ["--prompt", PROMPT, "--steps", "2", "--seed", "3", "--out", str(self.run_of(name) / "drawn.png")]
            commands.append(self.words("generate", "--run", str(self.run_of(name)), *drawn))
        job = {"commands": commands, "processes": row.processes, "log": str(self.log_of(name)), "seconds": PATIENCE}
        assert self.driver.stdin is not None
        print(json.dumps(job), file=self.driver.stdin, flush=True)

    def _config(self, name: str, config: Json, inputs: Path, end: str = "") -> str:
        """Write a row's configuration in the tree's own words; its path."""
        output = {each: str(self.place / each) for each in ("runs", "profiles", "cache")}
        own: Json = config | {"name": slug(name), "output": {**output, "report": False}}
        own = translate(own, self.schema) if self.older else own
        file = self.place / f"{slug(name)}{end}.json"
        file.write_text(json.dumps(own, indent=1).replace(INPUTS, str(inputs)))
        return str(file)

    def end(self) -> tuple[int, float]:
        """Wait for the row: its exit code and seconds."""
        assert self.driver.stdout is not None
        line = self.driver.stdout.readline()
        if not line:
            said = (self.place / "driver.log").read_text().strip().splitlines()[-1:]
            raise SystemExit(f"compare: the process that runs {self.code} has ended: {''.join(said)}")
        answer = json.loads(line)
        return answer["code"], answer["seconds"]

    def run_of(self, name: str) -> Path:
        """The folder of a row's run."""
        return self.place / "runs" / slug(name)

    def log_of(self, name: str) -> Path:
        """What a row's commands printed."""
        return self.place / f"{slug(name)}.log"


def slug(name: str) -> str:
    """A row's name as a run's name."""
    return "-".join("".join(each if each.isalnum() else " " for each in name).split())


def halved(train: object) -> Json:
    """A row's section train with half the steps."""
    assert isinstance(train, dict)
    return {**train, "steps": train["steps"] // 2}


def snapshot(commit: str | None, place: Path, root: Path = ROOT) -> str:
    """Write a commit's files, or those of the working tree with all changes, into a folder; what they are, in words.

    Raises:
        SystemExit: git does not know the commit.
    """
    place.mkdir()
    git = functools.partial(subprocess.run, cwd=root, capture_output=True, text=True)
    known = git(["git", "rev-parse", "--short", f"{commit or 'HEAD'}^{{commit}}"])
    if known.returncode:
        raise SystemExit(f"compare: git knows no commit {commit}: {known.stderr.strip()}")
    if commit is not None:
        packed = place.with_suffix(".tar")
        git(["git", "archive", "--output", str(packed), commit], check=True)
        shutil.unpack_archive(packed, place, filter="data")
        packed.unlink()
        return known.stdout.strip()
    listed = git(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_symlink() or (root / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, place / name, follow_symlinks=False)
    changed = git(["git", "status", "--porcelain"], check=True).stdout.strip()
    return f"{known.stdout.strip()} with changes" if changed else known.stdout.strip()


def compare_rows(trees: tuple[Tree, Tree], chosen: Mapping[str, Row], inputs: Path) -> dict[str, Comparison]:
    """Run rows in both trees at once and compare them.

    Args:
        trees: the older and the newer one.
        chosen: the rows by name.
        inputs: the folder of models and pictures.
    """
    found: dict[str, Comparison] = {}
    with trees[0].started(), trees[1].started():
        for number, (name, row) in enumerate(chosen.items(), 1):
            for tree in trees:
                tree.begin(name, row, inputs)
            ends = [tree.end() for tree in trees]
            failures = [_failure(tree, name, code) for tree, (code, _) in zip(trees, ends, strict=True) if code]
            seconds = (ends[0][1], ends[1][1])
            if failures:
                found[name] = Comparison(failure="; ".join(failures), seconds=seconds)
            else:
                found[name] = compare_runs(trees[0].run_of(name), trees[1].run_of(name), seconds)
            for tree in trees if found[name].equal else ():
                shutil.rmtree(tree.run_of(name))
            took = f"{seconds[0]:.1f} and {seconds[1]:.1f} s"
            print(f"{number}/{len(chosen)} {name}: {verdict(found[name])}, {took}", flush=True)
    return found


def _failure(tree: Tree, name: str, code: int) -> str:
    """How a row failed: the last line that it printed."""
    lines = [line.strip() for line in tree.log_of(name).read_text(errors="replace").splitlines() if line.strip()]
    return f"{'base' if tree.older else 'new'} ended with {code}: {lines[-1] if lines else 'without a word'}"


def verdict(one: Comparison) -> str:
    """A row's result in words."""
    if one.equal:
        return f"equal, {one.steps} steps, {one.tensors} tensors in {one.files} files"
    return "DIFFERENT: " + "; ".join(filter(None, (one.failure, one.losses, one.weights)))


def table(chosen: Mapping[str, Row], found: Mapping[str, Comparison]) -> str:
    """The rows as Markdown."""
    lines = [
        "| row | covers | steps | first loss | last loss | losses | tensors | files | weights | base, s | new, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        said = (one.failure, one.failure and "not compared") if one.failure else (one.losses, one.weights)
        cells = (name, chosen[name].covers, one.steps, one.first[:8], one.last[:8], said[0] or "equal", one.tensors,
                 one.files, said[1] or "equal", f"{one.seconds[0]:.1f}", f"{one.seconds[1]:.1f}")  # fmt: skip
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def machine() -> str:
    """The processor, and versions that numbers depend on."""
    info = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "diffusers", "transformers", "peft"))
    return f"{models[0] if models else platform.machine()}, Python {platform.python_version()}, {versions}"


def run(place: Path, base: str, chosen: Mapping[str, Row], root: Path = ROOT) -> tuple[str, bool]:
    """Compare two trees in a folder; the report, and whether everything is equal.

    Args:
        place: an empty folder for code, inputs and runs.
        base: the older commit.
        chosen: the rows to run, by name.
        root: the newer tree, whose files are copied as they are now.
    """
    began = time.monotonic()
    titles = snapshot(base, place / "base-code", root), snapshot(None, place / "new-code", root)
    trees = tuple(Tree(place / f"{side}-code", place / side, older=side == "base") for side in ("base", "new"))
    inputs = place / "inputs"
    write = [sys.executable, str(place / "new-code" / "tests" / "support" / "compare_inputs.py"), str(inputs)]
    written = subprocess.run(write, env=trees[1].environment, capture_output=True, text=True)
    if written.returncode:
        raise SystemExit(f"compare: the inputs cannot be written: {written.stderr.strip()}")
    older = trees[0].schema
    new = {name: lack for name, row in chosen.items() if (lack := unknown_members(translate(row.config, older), older))}
    found = compare_rows((trees[0], trees[1]), {name: row for name, row in chosen.items() if name not in new}, inputs)
    lacking = without_row(trees[1].schema, rows().values())
    different = [name for name, one in found.items() if not one.equal]
    tensors, files = sum(one.tensors for one in found.values()), sum(one.files for one in found.values())
    text = [
        f"# {titles[0]} and {titles[1]}\n",
        f"{len(found) - len(different)} of {len(found)} rows are equal to the bit: losses, gradient norms, "
        f"evaluations, {tensors:,} tensors and all pictures in {files:,} files. "
        f"{time.monotonic() - began:.0f} s. {machine()}.\n",
        *(f"- {name}: skipped, {titles[0]} has no {', '.join(lack)}" for name, lack in new.items()),
        *(f"- no row for {choice}" for choice in lacking),
        *(f"- {name}: {verdict(found[name])}" for name in different),
        table(chosen, found) if not (new or lacking or different) else "\n" + table(chosen, found),
    ]
    return "\n".join(text) + "\n", bool(found) and not (lacking or different)


def main(argv: list[str] | None = None) -> int:
    """Compare a commit with the working tree; 0 if everything is equal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_trees", description=__doc__.split("\n\n")[0])
    parser.add_argument("--base", required=True, metavar="COMMIT", help="the older tree")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose names contain it; several with ;")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there, too")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="a new folder for the logs, and the runs that differ (default: removed)",
    )
    args = parser.parse_args(argv)
    parts = [part.strip() for part in args.rows.split(";")]
    chosen = {name: row for name, row in rows().items() if name in parts or any(part in name for part in parts)}
    if not chosen:
        parser.error(f"--rows {args.rows!r} names no row. Known: {'; '.join(rows())}")
    with tempfile.TemporaryDirectory(prefix="simpletune-compare-") as temporary:
        if args.keep:
            args.keep.mkdir(parents=True)
        report, equal = run((args.keep or Path(temporary)).resolve(), args.base, chosen)
    print(report)
    if args.out:
        args.out.write_text(report)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
