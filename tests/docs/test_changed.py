"""``./test.sh --changed``: the tests that a change can concern, by a map of lines that may be older than the change."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import changed
import line_map
import pytest
from coverage import CoverageData

MODULE = """SCALE = 2


def up(value):
    if value < 0:
        return 0
    return value * SCALE


def down(value):
    return value / SCALE
"""
USER = """from simpletune.scale import up


def twice(value):
    return up(up(value))
"""
RAN = {
    "tests/test_scale.py::test_up": {"simpletune/scale.py": [5, 7]},
    "tests/test_scale.py::test_zero": {"simpletune/scale.py": [5, 6]},
    "tests/test_scale.py::test_down": {"simpletune/scale.py": [11]},
    "tests/test_user.py::test_twice": {"simpletune/user.py": [5], "simpletune/scale.py": [5, 7]},
    "tests/test_user.py::test_nothing": {"simpletune/user.py": [5]},
    "tests/test_other.py::test_other": {},
}
UP, ZERO, DOWN, TWICE, NOTHING, OTHER = RAN


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project under git, and the map of its tests."""
    root = tmp_path_factory.mktemp("original") / "tree"
    files = {
        "simpletune/scale.py": MODULE,
        "simpletune/user.py": USER,
        "tests/test_scale.py": "from simpletune.scale import down, up\n",
        "tests/test_user.py": "import helper\n",
        "tests/test_other.py": 'NAME = "page.md"\n',
        "tests/docs/test_pages.py": "",
        "tests/support/helper.py": "from deeper import DEEP\n",
        "tests/support/deeper.py": "DEEP = 1\n",
        "docs/page.md": "a page\n",
        "configs/a.json": "{}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    folder = root / line_map.STORE / "state"
    for name in ("simpletune/scale.py", "simpletune/user.py"):
        (folder / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "sources" / name).write_text(files[name])
    data = CoverageData(str(folder / "coverage"))
    for test, modules in RAN.items():
        data.set_context(f"{test}|run")
        data.add_lines({str(root / name): lines for name, lines in modules.items()})
    data.write()
    data.close()
    (folder / "commit").write_text("abc1234567\n")
    (folder / "times.json").write_text(json.dumps(dict.fromkeys(RAN, 0.1)))
    (root / ".gitignore").write_text(f"{line_map.STORE}/\n")
    git(root, "init", "-q")
    commit(root)
    return root


@pytest.fixture
def tree(original: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return shutil.copytree(original, tmp_path / "tree")


def git(root: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *own, *words], cwd=root, check=True, capture_output=True, text=True).stdout


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "a change")


def edit(root: Path, name: str, old: str, new: str) -> None:
    text = (root / name).read_text()
    assert text.count(old) == 1
    (root / name).write_text(text.replace(old, new))


def chosen(root: Path, base: str = "HEAD") -> set[str]:
    selection = changed.Selection(root, line_map.last_map(root), base)
    return {test for test in RAN if selection.holds(test)}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return 0", "return 1", {ZERO}),
        ("return value * SCALE", "return SCALE * value", {UP, TWICE}),
        ("        return 0\n", "        return 0\n    value += 0\n", {ZERO, UP, TWICE}),  # on both sides of a new line
        ("    if value < 0:\n        return 0\n", "", {UP, ZERO, TWICE}),
        ("SCALE = 2", "SCALE = 3", {UP, ZERO, DOWN, TWICE, NOTHING}),  # runs at import: also whoever imports it
        ("def down(value)", "def down(value=1)", {UP, ZERO, DOWN, TWICE, NOTHING}),
    ],
)
def test_a_changed_line_chooses_the_tests_that_run_it(tree: Path, old: str, new: str, expected: set[str]) -> None:
    edit(tree, "simpletune/scale.py", old, new)
    assert chosen(tree) == expected


def test_lines_are_shifted_where_the_map_is_older_than_the_base(tree: Path) -> None:
    edit(tree, "simpletune/scale.py", "SCALE = 2\n", "# Of both.\n# And more.\nSCALE = 2\n")
    edit(tree, "simpletune/scale.py", "        return 0\n", "        zero = 0\n        return zero\n")
    commit(tree)
    assert chosen(tree) == set()
    edit(tree, "simpletune/scale.py", "return value / SCALE", "return value * 1 / SCALE")
    assert chosen(tree) == {DOWN}
    git(tree, "checkout", "-q", ".")
    edit(tree, "simpletune/scale.py", "return zero", "return int(zero)")  # whose lines the map never had
    assert chosen(tree) == {ZERO}
    assert {ZERO, UP, DOWN} <= chosen(tree, "HEAD~1")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tests/test_other.py", {OTHER}),
        ("tests/support/deeper.py", {TWICE, NOTHING}),  # which the helper imports that the test imports
        ("docs/page.md", {OTHER}),
        ("configs/a.json", set(RAN)),
        ("pyproject.toml", set(RAN)),
        ("tests/conftest.py", set(RAN)),
    ],
)
def test_what_the_map_does_not_know_runs_whole(tree: Path, name: str, expected: set[str]) -> None:
    (tree / name).write_text("\n")
    selection = changed.Selection(tree, line_map.last_map(tree), "HEAD")
    assert {test for test in RAN if selection.holds(test)} == expected


def test_a_new_module_chooses_its_importers_and_a_test_of_no_map_runs(tree: Path) -> None:
    (tree / "simpletune" / "new.py").write_text("NEW = 1\n")
    (tree / "tests" / "test_other.py").write_text("def test_other():\n    from simpletune.new import NEW\n")
    commit(tree)
    edit(tree, "simpletune/new.py", "1", "2")
    assert chosen(tree) == {OTHER}
    assert changed.Selection(tree, line_map.last_map(tree), "HEAD").holds("tests/test_scale.py::test_new")


def test_a_page_chooses_the_tests_of_pages(tree: Path) -> None:
    (tree / "docs" / "page.md").write_text("another page\n")
    selection = changed.Selection(tree, line_map.last_map(tree), "HEAD")
    assert selection.files == {"tests/docs/test_pages.py", "tests/test_other.py"}


def test_without_a_map_all_run_and_it_says_how_to_make_one(tree: Path) -> None:
    selection = changed.Selection(tree, None, "HEAD")
    assert all(map(selection.holds, RAN))
    head = "changed since HEAD: 0 files; 6 tests run, 0 are left out"
    assert selection.words(6, 0) == f"{head}: there is no map of lines to tests (make map makes one)"
    with pytest.raises(pytest.UsageError, match="--changed nowhere: .*nowhere"):
        changed.Selection(tree, None, "nowhere")


def test_it_says_how_old_the_map_is_and_how_many_tests_it_left_out(tree: Path) -> None:
    edit(tree, "simpletune/scale.py", "return 0", "return 1")
    selection = changed.Selection(tree, line_map.last_map(tree), "HEAD")
    head = "changed since HEAD: 1 file; 1 tests run, 5 are left out"
    assert selection.words(1, 5) == f"{head}. The map is of abc1234567, 0.0 hours old (make map makes one)"
