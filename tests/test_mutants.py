"""The list of faults is sound, and the tool that tries them tells a caught one from all others, on a toy project."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import mutants
import pytest
import warm_pytest
from mutants import BadList, Mutant

FOLDERS = {each.parent for each in (mutants.ROOT / "simpletune").rglob("*.py")} | {mutants.ROOT / "benchmarks"}
TOY = {
    "toy/__init__.py": "",
    "toy/sums.py": "FREE = 1\n\n\ndef add(a, b):\n    return a + b\n\n\ndef least(a, b):\n    return min(a, b)\n",
    "tests/test_sums.py": "from toy.sums import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n",
    "tests/test_whole.py": "from toy.sums import least\n\n\ndef test_least():\n    assert least(2, 1) == 1\n",
    "tests/test_red.py": "def test_red():\n    assert False\n",
    "tests/test_broken.py": "import nothing\n\n\ndef test_never():\n    assert True\n",
    "tests/test_skipped.py": "import pytest\n\n\n@pytest.mark.skip\ndef test_skipped():\n    assert True\n",
    "pyproject.toml": "",
}
SIGN = Mutant("sign", "toy/sums.py", "return a + b", "return a - b", ("tests/test_sums.py::test_add",), "subtracts")
LARGEST = replace(SIGN, id="largest", find="min(a, b)", replace="max(a, b)")
SURVIVOR = replace(SIGN, id="survivor", find="FREE = 1", replace="FREE = 2")
ENDLESS = replace(SIGN, id="endless", replace="while True:\n        pass")
NO_IMPORT = replace(SIGN, id="no-import", find="def add", replace="def added")


def test_every_fault_of_the_list_can_be_tried() -> None:
    listed = mutants.read_list(mutants.ROOT / mutants.LIST)
    assert mutants.problems(mutants.ROOT, listed) == []
    assert len(listed) >= 40
    folders = {(mutants.ROOT / each.file).parent for each in listed}
    assert sorted(str(folder) for folder in FOLDERS - folders) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"find": "nowhere"}, "occurs 0 times in toy/sums.py, not once"),
        ({"find": "a, b"}, "occurs 3 times"),
        ({"find": ""}, "any number of times"),
        ({"replace": "return a + b"}, "find and replace are the same"),
        ({"replace": "return (a + b)"}, "changes nothing that runs"),
        ({"replace": "return a + b  # the sum"}, "changes nothing that runs"),
        ({"replace": "return a +"}, "no longer valid Python"),
        ({"file": "toy/gone.py"}, "there is no toy/gone.py"),
        ({"tests": ("tests/test_gone.py",)}, "there is no test tests/test_gone.py"),
        ({"tests": ("tests/test_sums.py::test_gone[1]",)}, "there is no test tests/test_sums.py::test_gone"),
        ({"tests": ()}, "names no test"),
        ({"why": ""}, "why must not be empty"),
    ],
)
def test_a_fault_that_cannot_be_one_is_refused(change: dict, message: str, toy: Path) -> None:
    (found,) = mutants.problems(toy, [replace(SIGN, **change)])
    assert found.startswith("sign: ") and message in found


def test_ids_are_unique_and_fields_known(toy: Path) -> None:
    assert mutants.problems(toy, [SIGN, SIGN]) == ["sign: occurs twice. Give one of them another id"]
    put(toy, SIGN)
    (toy / mutants.LIST).write_text((toy / mutants.LIST).read_text() + "whi = 'typo'\n")
    with pytest.raises(BadList, match="sign: an entry has the fields file, find, id"):
        mutants.read_list(toy / mutants.LIST)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than the tests
    monkeypatch.setattr(mutants, "WARM", (warm_pytest.BARE,))
    for name, text in TOY.items():
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(text)
    return tmp_path / "project"


def put(toy: Path, *faults: Mutant) -> None:
    """Write them as the toy's list; a JSON string or list is one of TOML too."""
    entries = ["".join(f"{key} = {json.dumps(value)}\n" for key, value in asdict(each).items()) for each in faults]
    (toy / mutants.LIST).write_text("".join(f"[[mutant]]\n{entry}\n" for entry in entries))


def states(toy: Path) -> dict[str, str]:
    file = toy / mutants.RESULTS
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["id"]: row["state"] for row in rows if "::" not in row["id"]}


def run(toy: Path, *words: str) -> int:
    return mutants.main(["--root", str(toy), "--jobs", "1", *words])


def test_what_comes_of_a_fault_is_told_apart_and_kept(toy: Path, monkeypatch, capsys) -> None:
    for name in ("broken", "skipped"):
        (toy / "tests" / f"test_{name}.py").unlink()
    put(toy, SIGN, LARGEST, SURVIVOR, ENDLESS, NO_IMPORT)
    with monkeypatch.context() as patch:
        patch.setattr(mutants, "PATIENCE", 0.3)
        assert run(toy, "--no-whole", "--only", "endless") == 0
    said = capsys.readouterr().out
    assert "1 of 1 faults caught (100.0%) (1 by taking too long" in said and not (toy / mutants.PAGE).exists()
    assert run(toy) == 1
    said = capsys.readouterr().out
    assert "3 of 4 faults caught (75.0%)" in said and "1 survived, 1 errors, 0 not tried" in said
    assert "without a fault" not in said and said.count("endless") == 0  # what is known already
    told = {"sign": "caught", "largest": "whole suite", "survivor": "survived", "endless": "timeout"}
    assert states(toy) == told | {"no-import": "error"}
    page = (toy / mutants.PAGE).read_text()
    assert "| sign | toy/sums.py | subtracts | caught | `tests/test_sums.py::test_add` |" in page
    assert "| largest | toy/sums.py | subtracts | whole suite | `tests/test_whole.py::test_least` |" in page
    assert (toy / "toy" / "sums.py").read_text() == TOY["toy/sums.py"]
    monkeypatch.setattr(mutants, "Copy", None)  # nothing is run again
    assert run(toy, "--only", "sign", "--only", "survivor") == 1


def test_tests_that_do_not_pass_without_a_fault_are_named(toy: Path, capsys) -> None:
    broken, skipped = "tests/test_broken.py", "tests/test_skipped.py"
    put(toy, replace(SIGN, tests=(broken,)), replace(SIGN, id="other", tests=(skipped,)))
    assert run(toy) == 2
    said = capsys.readouterr().err
    assert "not green without a fault" in said and states(toy) == {}
    assert f"{broken}: pytest ended with 2" in said and f"{skipped}: no test ran" in said


def test_slow_cases_are_tried_only_of_a_test_that_has_no_others(toy: Path) -> None:
    text = "import pytest\n\n\n@pytest.mark.slow\ndef test_slow():\n    pass\n\n\ndef test_fast():\n    pass\n"
    (toy / "tests" / "test_speeds.py").write_text(text)
    fast, slow = "tests/test_speeds.py::test_fast", "tests/test_speeds.py::test_slow[1]"
    assert mutants.markers(toy, [fast, "tests/test_speeds.py"]) == []
    assert mutants.markers(toy, [fast, slow]) == ["-m", mutants.SLOW_TOO]


def test_an_unknown_fault_is_refused(toy: Path, capsys) -> None:
    put(toy, SIGN)
    assert run(toy, "--only", "sing") == 2
    assert "--only: there is no fault sing" in capsys.readouterr().err


def test_a_result_counts_for_one_state_of_the_files(toy: Path) -> None:
    before = mutants.state_of(toy)
    put(toy, SIGN)
    assert mutants.state_of(toy) == before  # an entry has its own part in the key
    (toy / "tests" / "test_sums.py").write_text(TOY["tests/test_sums.py"] + "\n")
    assert mutants.state_of(toy) != before


def test_what_is_imported_from_elsewhere_is_refused(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(BadList, match="json would not be imported from the copy"):
        mutants.Copy(toy, tmp_path / "copy", ["json"])
