"""The pages of results: the index has each with its command, and the committed rows make them with today's code."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import (
    cards,
    dry_rows,
    host,
    hours,
    memory,
    methods,
    peaks,
    scaling_plans,
    scaling_tables,
    student_study,
    vertex,
    vertex_quality,
)
from simpletune.estimate.simulate.simulate import simulate
from simpletune.runs.report.markdown import markdown
from simpletune.system.options import Json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GRID = "python -m benchmarks "
LAST = "46c501ef"
"""The last commit with the grids that have gone."""


class Page(NamedTuple):
    """A row of the index."""

    name: str
    link: str
    command: str

    @property
    def file(self) -> Path:
        return (ROOT / "benchmarks" / self.link).resolve()

    @property
    def is_gone(self) -> bool:
        return self.command.endswith(f" at {LAST}")


def index() -> list[Page]:
    """The rows of ``benchmarks/README.md``."""
    text = (ROOT / "benchmarks" / "README.md").read_text()
    found = re.findall(
        r"^\| \[(.+?)\]\((.+?)\) \| .+ \| (`.+`(?: at \w+)?|by hand) \| .+ \| .*20\d\d.* \|$", text, re.M
    )
    assert len(found) == len(re.findall(r"^\| \[", text, re.M)), "a row lacks question, command, time or date"
    return [Page(name, link, command.replace("`", "")) for name, link, command in found]


INDEX = index()


def test_the_index_has_every_page_and_commands_that_exist() -> None:
    pages = {file for file in RESULTS.rglob("*.md") if not file.parent.name.startswith("gpu-")}  # those may be anyone's
    named = [page.file for page in INDEX]
    assert pages <= set(named) and len(named) == len(set(named)) and all(file.exists() for file in named)
    known = {benchmarks.name_of(grid) for grid in benchmarks.GRIDS}
    grids = {page.command.split()[3] for page in INDEX if page.command.startswith(GRID) and not page.is_gone}
    assert grids | {page.name for page in INDEX if page.command == "make kernels"} == known
    assert not known & {page.command.split()[3] for page in INDEX if page.is_gone}
    for page in INDEX:
        words = page.command.split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), page
        elif page.command.startswith(GRID) and not page.is_gone:
            benchmarks.parser().parse_args(words[3:])


@pytest.mark.parametrize("page", INDEX, ids=lambda page: page.name)
def test_a_page_names_its_command(page: Page) -> None:
    text = page.file.read_text()
    if page.is_gone:
        assert re.match(r"Made on \d+ November 2026 by commit \w{8}\b", text)
        assert f"Commit {LAST} is the last that has the grid: `{page.command.removesuffix(f' at {LAST}')}`." in text
    else:
        assert ("Written by hand" if page.command == "by hand" else page.command) in text


def committed(name: str) -> Json:
    rows: Json = json.loads((RESULTS / "cpu" / f"{name}.json").read_text())["rows"]
    return rows


LAID_OUT: dict[str, Callable[[Json], Any]] = {
    "hours": hours.page,
    "scaling": lambda rows: scaling_tables.page(rows, scaling_plans.PLANS),
    "vertex": vertex.page,
    "vertex_quality": lambda rows: vertex_quality.page("a command", rows),
    "student_study": lambda rows: student_study.page("a command", student_study.averaged(rows), rows),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_a_page_of_some_rows_is_laid_out(name: str) -> None:
    """Rows of predictions are the committed page's; means are over the seeds that there are."""
    kept = (RESULTS / "cpu" / f"{name}.md").read_text().splitlines()
    pages = [LAID_OUT[name](dict(itertools.islice(committed(name).items(), count))) for count in (0, 3)]
    told = [page if isinstance(page, list) else markdown(page).splitlines() for page in pages]
    new = [line for line in told[1] if line.startswith("|") and line not in told[0]]
    assert len(new) >= 3 and (name in ("student_study", "vertex_quality") or len(set(new) & set(kept)) >= 3)


# Pages and today's code


def table_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("|", "- command"))]


def text_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if not re.match(r"- (device|python|versions): ", line)]


MADE = [page for page in INDEX if page.command.startswith((GRID, "make kernels")) and not page.is_gone
        and page.name not in ("cards", "inference", "study", "graphs")]  # fmt: skip
"""Pages that their rows make: not of rows that are measured at once, of runs, or on a card."""
OLDER = ("quality", "which_method", "methods", "speed", "elementwise")  # with a text of their day


@pytest.mark.pages
@pytest.mark.parametrize("page", MADE, ids=lambda page: page.name)
def test_the_committed_rows_make_the_committed_page(page: Page, tmp_path: Path) -> None:
    words = page.command.removeprefix(GRID).split()
    if page.command == "make kernels":
        pytest.importorskip("triton")
        words = [page.name]
    folder = tmp_path / page.file.parent.name
    shutil.copytree(page.file.parent, folder, ignore=shutil.ignore_patterns("*.md"))
    out = tmp_path if words[0] == "dry" else folder
    assert benchmarks.main([*words, "--minutes", "0", "--out", str(out)]) == 0
    made, kept = ((place / page.file.name).read_text() for place in (folder, page.file.parent))
    if page.name not in OLDER:
        assert text_of(made) == text_of(kept)
    assert table_of(made) == table_of(kept) and len(table_of(kept)) > 4


@pytest.mark.pages
def test_the_page_of_cards_is_that_of_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the fit, which simulates every run."""
    monkeypatch.setattr(cards, "samples_of", lambda files: [])
    assert benchmarks.main(["cards", "--out", str(tmp_path)]) == 0
    whole = (ROOT / "docs/reference" / cards.PAGE).read_text()
    assert whole.partition("\n## ")[0].strip() == (tmp_path / cards.PAGE).read_text().strip()


@pytest.mark.pages
@pytest.mark.parametrize("name", [name for name in memory.ROWS if name not in dry_rows.GRID])
def test_rows_of_the_memory_grid_alone_are_todays(name: str) -> None:
    """The others are predicted anew whenever an allocation on the simulated card is compared with them."""
    row = memory.ROWS[name]
    found = (memory.predict_job if row.whole else memory.predict)(row.overrides)
    assert found["predicted_mib"] == pytest.approx(committed("memory")[name]["predicted_mib"], rel=1e-3)


@pytest.mark.pages
def test_a_peak_of_methods_is_todays() -> None:
    shipped, blocks = next(iter(methods.SHIPPED.items()))
    name = "lokr, factor 16, rank 16"
    config = methods.with_adapter(shipped, methods.METHODS[name], f"memory.checkpointing={blocks}")
    assert simulate(config).peak.bytes / methods.MIB == pytest.approx(committed("methods")[name][shipped], rel=1e-3)


@pytest.mark.pages
def test_a_peak_beside_a_published_one_is_todays() -> None:
    name = "SD 1.x, bf16, checkpointed"
    peak = simulate(peaks.ROWS[name].read(), capability=memory.SM_89).peak
    assert round(peak.bytes / peaks.GIB, 2) == committed("peaks")[name]["predicted_gib"]


@pytest.mark.pages
def test_the_tasks_of_a_step_are_todays() -> None:
    name = "SD3 Medium, not checkpointed"
    assert host.tasks_of(host.overrides_of(host.ROWS[name], "bf16")) == committed("host")[name]["tasks"]["bf16"]
