"""Do the tests notice a fault? Mutants of the package, drawn by a seed, against the tests that run their lines.

    make mutants SEED=n        or: python tests/support/mutants.py --seed 1 [--each 10] [--jobs 2] [--out mutants.md]

Cosmic Ray's operators make the mutants: ``each`` of every room, a module drawn by its size, then a place in it. Those
of annotations are not drawn, since nothing evaluates them. The tests of a mutant are those that run its line; of a line
that runs when its module is imported, those that run any line of the module; the fastest first, within LIMIT seconds.
Which test runs which line is found once for a state of the tree (line_map.py). A mutant without tests counts as a
survivor. A test that killed one must pass without it; if it does not, the mutant is tried again without that test.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from line_map import ENVIRONMENT, ROOT, LineMap, current_map, passed

LIMIT = 45.0  # seconds of tests for a mutant, by their times in the run that maps them
LONGEST = 600  # seconds until tests are given up, and the mutant survives; a test that hangs fails after 60
NOT_COPIED = (".git", ".venv*", ".mutants", ".*_cache", ".cache", ".hypothesis", "build", "dist", "runs", "wandb")
SKIPPED = ("core/NoOp", "core/VariableReplacer", "core/VariableInserter", "core/RemoveDecorator")


@dataclass
class Mutant:
    room: str
    file: str
    operator: str
    occurrence: int
    place: tuple[int, int, int, int]  # first line and column, last line and column
    diff: str = ""
    tests: list[str] = field(default_factory=list)
    killed_by: str = ""  # the first test that fails
    seconds: float = 0.0

    @property
    def lines(self) -> range:
        return range(self.place[0], self.place[2] + 1)


def annotations(code: str) -> set[tuple[int, int, int, int]]:
    """Where annotations stand: first line and column, last line and column."""
    found: set[tuple[int, int, int, int]] = set()
    for node in ast.walk(ast.parse(code)):
        for each in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(each, ast.expr):
                found.add((each.lineno, each.col_offset, each.end_lineno or 0, each.end_col_offset or 0))
    return found


def mutants_of(file: Path) -> list[Mutant]:
    """Every mutant of a module."""
    code, name = file.read_text(), file.relative_to(ROOT).as_posix()
    tree, spans = get_ast(code), annotations(code)
    nodes, found = list(ast_nodes(tree)), []
    for operator_name in operator_names():
        if operator_name in SKIPPED:
            continue
        operator = get_operator(operator_name)()
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(places):
            if not any(span[:2] <= start and end <= span[2:] for span in spans):
                found.append(Mutant(name.split("/")[1], name, operator_name, occurrence, (*start, *end)))
    return found


def sample(seed: int, each: int) -> list[Mutant]:
    """Draw ``each`` mutants of every room."""
    chance = random.Random(seed)
    drawn = []
    for room in sorted(folder for folder in (ROOT / "simpletune").iterdir() if (folder / "__init__.py").exists()):
        files = sorted(file for file in room.rglob("*.py"))
        chosen: set[tuple[str, str, int]] = set()
        for _ in range(100 * each):
            if len(chosen) == each:
                break
            file = chance.choices(files, [file.stat().st_size for file in files])[0]
            if possible := mutants_of(file):
                place = chance.choice(sorted({mutant.place for mutant in possible}))
                mutant = chance.choice([mutant for mutant in possible if mutant.place == place])
                key = (mutant.file, mutant.operator, mutant.occurrence)
                if key not in chosen:
                    chosen.add(key)
                    drawn.append(mutant)
    return drawn


def tests_of(mutant: Mutant, mapped: LineMap) -> list[str]:
    """The tests that run a mutant's lines, the fastest first."""
    lines_of = mapped.lines_by_test(mutant.file)
    found = {test for test, lines in lines_of.items() if not lines.isdisjoint(mutant.lines)} or set(lines_of)
    chosen, spent = [], 0.0
    for test in sorted(found, key=lambda test: (mapped.times[test], test)):
        spent += mapped.times[test]
        if chosen and spent > LIMIT:
            break
        chosen.append(test)
    return chosen


def run(mutant: Mutant, tree: Path) -> None:
    """Run a mutant's tests in a copy of the tree, until one fails."""
    file = tree / mutant.file
    before = file.read_text()
    operator = get_operator(mutant.operator)()
    after = mutate_code(before, operator, mutant.occurrence)
    assert after is not None and after != before, mutant
    changed = [line for line in after.splitlines() if line not in before.splitlines()]
    mutant.diff = changed[0].strip() if changed else "(a line less)"
    if not mutant.tests:
        return
    began = time.monotonic()
    file.write_text(after)
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--timeout", "60", *mutant.tests]
        environment = ENVIRONMENT | {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST)
        if done.returncode:
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
            named = [test for test in mutant.tests if any(line.split(" ", 1)[1].startswith(test) for line in failed)]
            mutant.killed_by = max(named, key=len) if named else " ".join(failed)[:300] or f"exit {done.returncode}"
    except subprocess.TimeoutExpired:
        pass  # a busy machine
    finally:
        file.write_text(before)
        mutant.seconds = time.monotonic() - began


def failing(mutants: list[Mutant], tree: Path) -> set[str]:
    """Of the tests that killed mutants those that fail without one, too."""
    killers = sorted({mutant.killed_by for mutant in mutants if mutant.killed_by in mutant.tests})
    report = tree / "killers.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--timeout", "300", f"--junitxml={report}", *killers]
    subprocess.run(command, cwd=tree, env=ENVIRONMENT | {"PYTHONPATH": str(tree)}, capture_output=True)
    return set(killers) - {test for test, _ in passed(report)}


def not_copied(folder: str, names: list[str]) -> set[str]:
    """What a copy does not need: compiled modules, and of the tree itself what git, tools and runs keep there."""
    unwanted = ("__pycache__", *(NOT_COPIED if Path(folder) == ROOT else ()))
    return set(shutil.ignore_patterns(*unwanted)(folder, names))


def table(mutants: list[Mutant], seed: int) -> str:
    """The rates by room, then the survivors."""
    lines = [
        f"# Mutants of seed {seed}",
        "",
        f"`make mutants SEED={seed}` draws them and runs the tests.",
        "",
        "| room | mutants | killed | survived | no test |",
        "|---|---|---|---|---|",
    ]
    for room in [*sorted({mutant.room for mutant in mutants}), "all"]:
        own = [mutant for mutant in mutants if room in (mutant.room, "all")]
        killed, bare = sum(bool(each.killed_by) for each in own), sum(not each.tests for each in own)
        lines.append(
            f"| {room} | {len(own)} | {killed} ({killed / len(own):.0%}) | {len(own) - killed - bare} | {bare} |"
        )
    lines += ["", "| survivor | operator | the line |", "|---|---|---|"]
    for mutant in mutants:
        if not mutant.killed_by:
            text = mutant.diff.replace("|", "\\|")
            lines.append(f"| {mutant.file}:{mutant.lines.start} | {mutant.operator.partition('/')[2]} | `{text}` |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--each", type=int, default=10, help="mutants of each room")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--out", type=Path, help="file of the table")
    options = parser.parse_args()
    mapped = current_map()
    mutants = sample(options.seed, options.each)
    for mutant in mutants:
        mutant.tests = tests_of(mutant, mapped)
    with tempfile.TemporaryDirectory() as place:
        trees = [Path(place) / str(number) / ROOT.name for number in range(options.jobs)]
        for tree in trees:
            shutil.copytree(ROOT, tree, ignore=not_copied, symlinks=True)
        waiting = mutants

        def work(part: int) -> None:
            for mutant in waiting[part :: options.jobs]:
                run(mutant, trees[part])
                outcome, line = "killed  " if mutant.killed_by else "SURVIVED", f"{mutant.file}:{mutant.lines.start}"
                tests = f"({len(mutant.tests)} tests, {mutant.seconds:.1f} s)"
                print(outcome, line, mutant.diff, tests, mutant.killed_by, flush=True)

        while waiting:
            with ThreadPoolExecutor(options.jobs) as pool:
                list(pool.map(work, range(options.jobs)))
            broken = failing(mutants, trees[0])
            waiting = [mutant for mutant in mutants if mutant.killed_by in broken]
            for mutant in waiting:
                print(f"{mutant.killed_by} fails without a mutant, too", flush=True)
                mutant.tests = [test for test in mutant.tests if test not in broken]
                mutant.killed_by = ""
    text = table(mutants, options.seed)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
