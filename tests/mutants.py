"""Does a test fail for each fault of tests/mutants.toml? ``make mutants``.

Each fault is put into a copy of the project, never into the checkout, and its own tests run until the first one fails.
Where none does, the whole suite runs. Results are kept, so the same command goes on where it stopped: a result counts
for one fault, one state of all files, and one set of installed packages.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import distributions
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
LIST, RESULTS, PAGE, OWN_TEST = "tests/mutants.toml", ".mutants.jsonl", "docs/mutants.md", "tests/test_mutants.py"
NOT_COPIED = {".git", ".venv", ".mutants.jsonl", "__pycache__", "shared"}
NOT_HANDED_ON = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST", "GIT_", "COV_")  # of the environment
CAUGHT, SLOW, BY_SUITE, SURVIVED, ERROR = "caught", "timeout", "whole suite", "survived", "error"
NOTICED = (CAUGHT, SLOW, BY_SUITE)
SLOW_TOO = "not gpu and not dry and not softgpu"
WARM: tuple[str, ...] = ()  # words for tests/warm_pytest.py
PATIENCE = 60.0  # seconds beside ten times what the tests take without the fault
SUITE_PATIENCE = 7200.0  # seconds
MOST_FAILED = 20  # tests of the whole suite, after which it stops


class BadList(Exception):
    """The list of faults, or the tests that it names, are wrong."""


@dataclass(frozen=True)
class Mutant:
    """A fault; tests/mutants.toml says what the fields are."""

    id: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Row:
    """The result of a fault, or of a test without a fault, whose node id then replaces the fault's id."""

    key: str
    id: str
    state: str
    seconds: float
    by: str = ""
    """The test that failed, or what went wrong."""
    whole: bool = False
    """Whether the whole suite ran."""


@dataclass
class Ran:
    """A run of pytest: its exit code (None: it took too long), and the node ids of passed and failed tests."""

    code: int | None
    seconds: float
    passed: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    tail: str = ""


# --- the list -------------------------------------------------------------------------------------------------------


def read_list(file: Path) -> list[Mutant]:
    """Read the faults of a file.

    Raises:
        BadList: an entry lacks a field or has an unknown one.
    """
    names, found = {each.name for each in fields(Mutant)}, []
    for entry in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]:
        if set(entry) != names:
            raise BadList(f"{entry.get('id', entry)}: an entry has the fields {', '.join(sorted(names))}, each once")
        found.append(Mutant(**{**entry, "tests": tuple(entry["tests"])}))
    return found


def problems(root: Path, mutants: Sequence[Mutant]) -> list[str]:
    """List what is wrong with the faults, as far as it shows without running anything."""
    twice = [name for name, count in Counter(mutant.id for mutant in mutants).items() if count > 1]
    found = [f"{name}: occurs twice. Give one of them another id" for name in twice]
    defined: dict[str, dict[str, bool] | None] = {}
    for mutant in mutants:
        found += [f"{mutant.id}: {text}" for text in _faults_of_entry(root, mutant)]
        if not mutant.tests:
            found.append(f"{mutant.id}: names no test")
        for test in mutant.tests:
            file, _, rest = test.partition("::")
            if file not in defined:
                defined[file] = _functions(root / file)
            known = defined[file]
            if known is None or (rest and rest.partition("[")[0].rpartition("::")[2] not in known):
                found.append(f"{mutant.id}: there is no test {test}")
    return found


def _faults_of_entry(root: Path, mutant: Mutant) -> list[str]:
    file = root / mutant.file
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant.id) or not mutant.why:
        return ["an id has letters, digits and dashes, and why must not be empty"]
    if not file.is_file():
        return [f"there is no {mutant.file}"]
    if mutant.find == mutant.replace:
        return ["find and replace are the same"]
    text = file.read_text(encoding="utf-8")
    if not mutant.find or (count := text.count(mutant.find)) != 1:
        return [f"its text occurs {count if mutant.find else 'any number of'} times in {mutant.file}, not once"]
    if file.suffix != ".py":
        return []
    try:
        changed = ast.dump(ast.parse(text.replace(mutant.find, mutant.replace)))
    except SyntaxError as error:
        return [f"{mutant.file} is no longer valid Python (line {error.lineno}: {error.msg})"]
    return ["changes nothing that runs"] if changed == _dump(text) else []


@functools.lru_cache(maxsize=64)
def _dump(text: str) -> str:
    """The syntax of a file, which often has several faults."""
    return ast.dump(ast.parse(text))


def _functions(file: Path) -> dict[str, bool] | None:
    """Names of a file's functions, and whether each is marked slow as a whole; None: there is no such file."""
    if not file.is_file():
        return None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {
        node.name: any(ast.unparse(each) == "pytest.mark.slow" for each in node.decorator_list) for node in functions
    }


def markers(root: Path, tests: Sequence[str]) -> list[str]:
    """What pytest is told to select: slow cases only where a test has no others."""
    found = []
    for test in tests:
        file, _, rest = test.partition("::")
        name = rest.partition("[")[0].rpartition("::")[2]
        found.append((_functions(root / file) or {}).get(name, False))
    return ["-m", SLOW_TOO] if any(found) else []


# --- copies and what runs in them -----------------------------------------------------------------------------------


def project_files(root: Path) -> list[str]:
    """The files of a project: those that git knows or does not ignore; without git all."""
    if (root / ".git").exists():
        words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    else:
        names = [file.relative_to(root).as_posix() for file in root.rglob("*")]
    kept = (name for name in set(names) if name and not NOT_COPIED & set(Path(name).parts))
    return sorted(name for name in kept if (root / name).is_file() or (root / name).is_symlink())


def state_of(root: Path) -> str:
    """A name for everything that a result depends on, but for the list and the page of results."""
    digest = hashlib.sha256(json.dumps(sorted(f"{each.name} {each.version}" for each in distributions())).encode())
    digest.update(sys.version.encode())
    for name in project_files(root):
        if name not in (LIST, PAGE):
            content = hashlib.sha256((root / name).read_bytes() if (root / name).is_file() else b"").hexdigest()
            digest.update(f"{name}\0{content}\0".encode())
    return digest.hexdigest()


def key_of(state: str, what: object) -> str:
    """What a result is kept under."""
    return hashlib.sha256(json.dumps([state, what]).encode()).hexdigest()[:20]


class Copy:
    """A copy of the project, in which one thing runs at a time. Use it as a context: its process ends with it.

    Args:
        root: of the project.
        folder: that is made.
        packages: that must be imported from the copy.
    """

    running: ClassVar[set[int]] = set()
    """Process groups of what runs in all copies."""

    def __init__(self, root: Path, folder: Path, packages: Iterable[str]):
        self.root, self.folder, self.scratch = root, folder / "project", folder / "scratch"
        for name in project_files(root):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, self.folder / name, follow_symlinks=False)
        names = sorted(packages)
        # Compiled once, and checked by content: files that change within a second keep their time stamp.
        whole = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *names]
        subprocess.run([sys.executable, *whole], cwd=self.folder, check=True, capture_output=True)
        code = "import importlib, sys; [print(*importlib.import_module(name).__path__) for name in sys.argv[1:]]"
        words, environment = [sys.executable, "-P", "-c", code, *names], self._environment()
        done = subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, text=True)
        found = done.stdout.splitlines()
        if done.returncode or [line for line in found if not Path(line).is_relative_to(self.folder)] or not found:
            raise BadList(f"{', '.join(names)} would not be imported from the copy: {found} {done.stderr[-500:]}")
        words = [sys.executable, "-P", str(Path(__file__).with_name("warm_pytest.py")), *WARM]
        self._warm = subprocess.Popen(
            words, cwd=self.folder, env=environment, start_new_session=True, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def close(self) -> None:
        """End the process."""
        kill(self._warm.pid)
        self._warm.communicate()

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(NOT_HANDED_ON)}
        data = self.root.parent / "shared" / "data"
        return kept | {
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "SIMPLETUNE_TEST_DATA": os.environ.get("SIMPLETUNE_TEST_DATA", str(data)),
        }

    @contextmanager
    def faulty(self, mutant: Mutant) -> Iterator[None]:
        """Within this context the copy has the fault."""
        file = self.folder / mutant.file
        before = file.read_bytes()
        try:
            file.write_text(before.decode().replace(mutant.find, mutant.replace), encoding="utf-8")
            yield
        finally:
            file.write_bytes(before)

    def pytest(self, words: Sequence[str], limit: float) -> Ran:
        """Run pytest for a limited time, then kill it and everything it started."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        report, said = self.scratch / "report.xml", self.scratch / "said"
        places = {"TMPDIR": str(self.scratch), "HYPOTHESIS_STORAGE_DIRECTORY": str(self.scratch / "hypothesis")}
        always = ["-q", "--tb=line", "-p", "no:cacheprovider", f"--rootdir={self.folder}", f"--junitxml={report}"]
        job = {
            "folder": str(self.folder),
            "words": [*always, "-o", "junit_family=xunit1", *words],
            "environment": self._environment() | places,
            "said": str(said),
        }
        try:
            code, seconds = self._ended(job, limit)
            text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
            ran = Ran(code, round(seconds, 2), tail=text[-1500:])
            for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
                node = f"{case.get('file')}::{case.get('name')}"
                bad = case.find("failure") if case.find("failure") is not None else case.find("error")
                if bad is not None:
                    ran.failed[node] = bad.get("message", "")
                elif case.find("skipped") is None:
                    ran.passed[node] = float(case.get("time", 0))
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
        return ran

    def _ended(self, job: dict[str, object], limit: float) -> tuple[int | None, float]:
        """Have a job run; its exit code (None: it took too long), and its seconds."""
        assert self._warm.stdin is not None and self._warm.stdout is not None
        self._warm.stdin.write(json.dumps(job).encode() + b"\n")
        pid = int(self._warm.stdout.readline() or 0)  # waits for the imports, the first time
        if not pid:
            raise BadList(f"the process that runs pytest has ended with {self._warm.wait()}")
        clock = time.monotonic()
        self.running.add(pid)
        in_time = bool(select.select([self._warm.stdout], [], [], limit)[0])
        kill(pid)
        self.running.discard(pid)
        code = int(self._warm.stdout.readline())
        return code if in_time else None, time.monotonic() - clock


def kill(group: int) -> None:
    """End a process and what it has started, if any of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def belongs(node: str, test: str) -> bool:
    """Whether a test that ran is one that an entry names: a file, a function, or one of its cases."""
    file, _, rest = node.partition("::")
    wanted, _, name = test.partition("::")
    return file == wanted and (not name or name.rpartition("::")[2] in (rest, rest.partition("[")[0]))


# --- the work -------------------------------------------------------------------------------------------------------


class Work:
    """Copies at work, and the results.

    Args:
        root: of the project.
        results: the file that they are kept in.
        minutes: nothing is begun after so many; None: no limit.
    """

    def __init__(self, root: Path, results: Path, minutes: float | None):
        self.root, self._file, self._lock = root, results, threading.Lock()
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self.state = state_of(root)
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        self.rows = {row.key: row for row in map(_read_row, lines) if row is not None}
        self._copies: SimpleQueue[Copy] = SimpleQueue()
        self.jobs, self._stopped = 0, False

    @contextmanager
    def copies(self, folder: Path, jobs: int, packages: Iterable[str]) -> Iterator[None]:
        """Within this context there are copies to work in."""
        with ExitStack() as made:
            for number in range(jobs):
                copy = Copy(self.root, folder / str(number), packages)
                made.callback(copy.close)
                self._copies.put(copy)
            self.jobs = jobs
            yield

    def row_of(self, mutant: Mutant) -> Row | None:
        """What is known of a fault."""
        return self.rows.get(key_of(self.state, asdict(mutant)))

    def keep(self, row: Row) -> None:
        """Keep a result, on disk too."""
        with self._lock:
            if self._stopped:  # what was killed says nothing
                return
            self.rows[row.key] = row
            with open(self._file, "a", encoding="utf-8") as handle:
                handle.write(json.dumps(asdict(row)) + "\n")

    def each(self, do: Callable[[Copy, object], None], items: Sequence[object]) -> None:
        """Do something with each, in as many copies as there are; what an item raises is raised."""

        def one(item: object) -> None:
            if self._end is not None and time.monotonic() > self._end:
                return
            copy = self._copies.get()
            try:
                do(copy, item)
            finally:
                self._copies.put(copy)

        pool = ThreadPoolExecutor(self.jobs)
        try:
            for done in [pool.submit(one, item) for item in items]:
                done.result()
        except BaseException:
            self._stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            for group in list(Copy.running):
                kill(group)
            raise
        finally:
            pool.shutdown(wait=True)

    def require_green(self, mutants: Sequence[Mutant]) -> None:
        """Run the tests without a fault: where one fails, or none runs, each fault would look caught, or none.

        Raises:
            BadList: with the tests.
        """
        tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
        files: dict[str, list[str]] = {}
        for test in tests:
            if key_of(self.state, test) not in self.rows:
                files.setdefault(test.partition("::")[0], []).append(test)
        bad: list[str] = []

        def run(copy: Copy, item: object) -> None:
            wanted = files[str(item)]
            ran = copy.pytest([*markers(self.root, wanted), *wanted], SUITE_PATIENCE)
            print(f"without a fault  {ran.seconds:6.1f} s  {item}", flush=True)
            for test in wanted:
                passed = {node: each for node, each in ran.passed.items() if belongs(node, test)}
                failed = [node for node in ran.failed if belongs(node, test)]
                if ran.code == 0 and passed:
                    self.keep(Row(key_of(self.state, test), test, CAUGHT, round(sum(passed.values()), 2)))
                elif ran.code in (0, 1):
                    bad.extend(failed or ([] if passed else [f"{test}: no test ran"]))
                else:
                    bad.append(f"{test}: pytest ended with {ran.code}\n{ran.tail}")

        self.each(run, list(files))
        if bad:
            raise BadList("\n".join(["not green without a fault:", *bad]))

    def try_one(self, copy: Copy, mutant: Mutant) -> Row | None:
        """Run a fault's own tests; None: time was up before they were known to be green."""
        green = [self.rows.get(key_of(self.state, test)) for test in mutant.tests]
        if None in green:
            return None
        limit = PATIENCE + 10 * sum(row.seconds for row in green if row is not None)
        with copy.faulty(mutant):
            ran = copy.pytest(["-x", *markers(self.root, mutant.tests), *mutant.tests], limit)
        return self._judged(mutant, ran)

    def try_suite(self, copy: Copy, mutant: Mutant) -> Row:
        """Run every test; those that also fail without the fault, in a copy or by themselves, do not count."""
        with copy.faulty(mutant):
            ran = copy.pytest([f"--maxfail={MOST_FAILED}", f"--ignore={OWN_TEST}"], SUITE_PATIENCE)
        row = self._judged(mutant, ran, whole=True)
        if row.state == SLOW:
            return replace(row, state=ERROR, by=f"the whole suite takes more than {SUITE_PATIENCE:g} s")
        if row.state != BY_SUITE:
            return row
        alone = copy.pytest(list(ran.failed), SUITE_PATIENCE)
        counted = [node for node in ran.failed if node in alone.passed]
        if counted:
            return replace(row, by=counted[0])
        if alone.code == 1 and len(ran.failed) < MOST_FAILED:
            return replace(row, state=SURVIVED, by=f"without the fault too: {' '.join(ran.failed)}")
        return replace(row, state=ERROR, by=f"the suite is not green without the fault: {' '.join(ran.failed)}")

    def _judged(self, mutant: Mutant, ran: Ran, whole: bool = False) -> Row:
        by = next(iter(ran.failed), "")
        state = {0: SURVIVED, 1: CAUGHT, None: SLOW}.get(ran.code, ERROR)
        if state == CAUGHT:
            state = SLOW if "Timeout" in ran.failed.get(by, "") and not whole else BY_SUITE if whole else CAUGHT
        elif state == SLOW:
            by = " ".join(mutant.tests)
        elif state == ERROR:
            by = f"pytest ended with {ran.code}, so nothing is known: {' '.join(ran.tail.split())[-400:]}"
        return Row(key_of(self.state, asdict(mutant)), mutant.id, state, ran.seconds, by, whole)


def _read_row(line: str) -> Row | None:
    """Parse a kept result; None: a killed process has left half a line."""
    try:
        return Row(**json.loads(line))
    except (ValueError, TypeError):
        return None


def run(mutants: Sequence[Mutant], work: Work, jobs: int, whole: bool) -> None:
    """Try every fault without a result, then try survivors with the whole suite."""
    todo = [mutant for mutant in mutants if (row := work.row_of(mutant)) is None or row.state == ERROR]
    packages = {Path(mutant.file).parts[0] for mutant in mutants if mutant.file.endswith(".py")}

    def tried(copy: Copy, item: object, how: Callable[[Copy, Mutant], Row | None]) -> None:
        assert isinstance(item, Mutant)
        row = how(copy, item)
        if row is not None:
            work.keep(row)
            print(f"{row.state:<12}{row.seconds:7.1f} s  {item.id:<40}{row.by[:200]}", flush=True)

    def survivors() -> list[Mutant]:
        rows = {mutant: work.row_of(mutant) for mutant in mutants}
        return [mutant for mutant, row in rows.items() if row and row.state == SURVIVED and not row.whole]

    if not todo and not (whole and survivors()):
        return
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        work.copies(Path(folder), jobs, packages),
    ):
        work.require_green(todo)
        work.each(lambda copy, item: tried(copy, item, work.try_one), todo)
        if whole:
            work.each(lambda copy, item: tried(copy, item, work.try_suite), survivors())


# --- output ---------------------------------------------------------------------------------------------------------


def score(rows: Sequence[Row | None]) -> str:
    """Summarise the results in a line."""
    states = Counter(row.state for row in rows if row is not None)
    noticed = sum(states[state] for state in NOTICED)
    judged = noticed + states[SURVIVED]
    share = f" ({noticed / judged:.1%})" if judged else ""
    slow = f" ({states[SLOW]} by taking too long, {states[BY_SUITE]} by the whole suite alone)"
    return (
        f"{noticed} of {judged} faults caught{share}{slow if states[SLOW] or states[BY_SUITE] else ''}; "
        f"{states[SURVIVED]} survived, {states[ERROR]} errors, {rows.count(None)} not tried"
    )


def write_page(root: Path, mutants: Sequence[Mutant], rows: Sequence[Row | None], command: str) -> Path:
    """The results as a page."""
    from simpletune.system.environment import describe_machine

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ")

    machine = {**describe_machine(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "command": f"`{command}`"}
    about = (
        "Do the tests notice a mistake? Each fault of `tests/mutants.toml` was put into a copy of the project, one at "
        "a time. The tests that should catch it ran until the first failed; if none did, the whole suite ran. "
        "*timeout* means that a test did not end. Seconds are for a whole pytest process while others ran on the "
        "machine."
    )
    lines = ["# Faults that the tests catch", "", about, "", *(f"- {key}: {value}" for key, value in machine.items())]
    lines += [f"- result: {score(rows)}", "", "| fault | file | what | result | test | s |"]
    lines.append("|---|---|---|---|---|---|")
    for mutant, row in zip(mutants, rows, strict=True):
        if row is not None:
            by = f"`{cell(row.by)}`" if row.by else ""
            lines.append(
                f"| {mutant.id} | {mutant.file} | {cell(mutant.why)} | {row.state} | {by} | {row.seconds:.1f} |"
            )
    (root / PAGE).parent.mkdir(exist_ok=True)
    (root / PAGE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root / PAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Try the faults.

    Returns:
        0: all tried faults are caught; 1: one survives or has an error; 2: the list or one of its tests is wrong; 130:
        Ctrl-C or SIGTERM.
    """
    parser = argparse.ArgumentParser(description="does a test fail for each fault of tests/mutants.toml?")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the project")
    parser.add_argument("--only", action="append", metavar="ID", help="try this fault; repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the project to use at once (default: 2)")
    parser.add_argument("--minutes", type=float, help="start no fault after this many; the same command continues")
    parser.add_argument(
        "--whole", action=argparse.BooleanOptionalAction, default=True, help="run all tests on survivors"
    )
    args = parser.parse_args(argv)
    root = args.root.resolve()
    try:
        mutants = read_list(root / LIST)
        if wrong := problems(root, mutants):
            raise BadList("\n".join(wrong))
        chosen = [mutant for mutant in mutants if args.only is None or mutant.id in args.only]
        if unknown := set(args.only or ()) - {mutant.id for mutant in chosen}:
            raise BadList(f"--only: there is no fault {', '.join(sorted(unknown))}")
        work = Work(root, root / RESULTS, args.minutes)
        run(chosen, work, args.jobs, args.whole)
    except BadList as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on", file=sys.stderr)
        return 130
    found = [work.row_of(mutant) for mutant in chosen]
    for mutant, row in zip(chosen, found, strict=True):
        if row is None or row.state not in NOTICED:
            by = f" ({row.by})" if row and row.by else ""
            print(f"{row.state if row else 'not tried':<12}{mutant.id}: {mutant.why}{by}")
    print(score(found))
    rows = [work.row_of(mutant) for mutant in mutants]
    if None not in rows:
        print(f"written: {write_page(root, mutants, rows, 'make mutants')}")
    return int(any(row is not None and row.state not in NOTICED for row in found))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or what runs would be left behind
    sys.exit(main())
