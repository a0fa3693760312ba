"""README, CONTRIBUTING and docs: simpletune's own commands run after the demo or are parsed; verbs, grids, paths and
links exist. What else a reader would run: test_blocks.py.

docs/explanation/how-it-works.md names functions that a step of the demo passes through, in their order.
"""

from __future__ import annotations

import functools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
import torch
from documented import NOT_RUN, PAGES, Command, commands, inline_verbs
from PIL import Image
from slow_cases import slow_but
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.__main__ import GRIDS, name_of
from benchmarks.__main__ import parser as grids_parser
from simpletune.apps.cli import main as command_line
from simpletune.apps.cli.main import VERB_GROUPS, VERBS, main, parse
from simpletune.config.load import read_config
from simpletune.estimate.timing import calibrate, composite, host_probes, stopwatch
from simpletune.estimate.timing.probes import TimingProbe
from simpletune.system.options import UserError

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs" / "reference" / "commands.md").read_text()
FOLDERS = ("simpletune", "configs", "benchmarks", "inference", "profiles", "tests", "docs")
PACKAGE, MAP = ROOT / "simpletune", ROOT / "docs" / "explanation" / "how-it-works.md"
DIFFUSERS_SCRIPTS = {"train_dreambooth_lora_sd3.py", "train_dreambooth_sd3.py"}
SHOWN = [command for page in PAGES for command in commands(page)]
RUN_ON = [page for page in PAGES if any(command.why_not_run() is None for command in commands(page))]
QUICK = ["validation.steps=2", "validation.loss_samples=4"]
FEW = ["data.path=demo:subject", "train.batch_size=1"]  # 5 pictures
DEMO = ["train.steps=8", "checkpoint.every=4", "validation.every=null", "profile.max_traces=1", *QUICK, *FEW]
SHORTER = {"@100": "@4", "@200": "@8", "steps=250": "steps=8", "every=50": "every=4"}  # than on the pages


@pytest.fixture(scope="module")
def passed() -> dict[str, None]:
    """``file::function`` of the package by their first call between the ends of the third and the fourth update of the
    demo, without functions inside functions."""
    return {}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, passed: dict[str, None]) -> Path:
    """A folder in which the demo was run, for a few steps."""
    folder, updates = tmp_path_factory.mktemp("readme"), list[object]()

    def called(frame: FrameType, event: str, argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents and "<" not in frame.f_code.co_qualname:
            passed[f"{file.relative_to(PACKAGE)}::{frame.f_code.co_qualname}"] = None

    def updated(*_: object) -> None:
        updates.append(None)
        sys.setprofile(called if len(updates) == 3 else None)

    hook = register_optimizer_step_post_hook(updated)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            assert main(["train", "demo", *DEMO, "device=cpu"]) == 0
    finally:
        hook.remove()
        sys.setprofile(None)
    assert len(updates) >= 8  # the prediction for the traces simulates some more
    return folder


@pytest.fixture
def after_the_demo(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder for each test, as the current one."""
    folder = tmp_path / "project"
    shutil.copytree(demo, folder)
    monkeypatch.chdir(folder)
    Image.new("RGB", (64, 64), "orange").save("cat.png")  # of the page on inpainting
    Image.radial_gradient("L").point(lambda value: 255 * (value < 128)).resize((64, 64)).save("cat-mask.png")
    return folder


def execute(command: Command, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Run a command in this process, scripts too."""
    words = command.words()
    for theirs, ours in SHORTER.items():
        words = [word.replace(theirs, ours) for word in words]
    if words[0] == "simpletune":
        return main(words[1:] + (QUICK if words[1] == "train" else []))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", words[1:])
        patch.syspath_prepend(str(ROOT / "inference"))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    return ended.value.code


@pytest.fixture
def calibrated_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of operation is measured, at its smallest shape and briefly; all shapes take a minute and a half."""
    probes_of = calibrate.probes_of

    def smallest(probe: TimingProbe) -> TimingProbe:
        return replace(probe, axes={name: values[:1] for name, values in probe.axes.items()})

    monkeypatch.setattr(calibrate, "probes_of", lambda device: map(smallest, probes_of(device)))
    monkeypatch.setattr(composite, "ON_CPU", ())
    monkeypatch.setattr(stopwatch, "ENOUGH", 1e-4)
    monkeypatch.setattr(stopwatch, "reference_load", lambda: torch.ones(1).sum)
    monkeypatch.setattr(host_probes, "SIDE", 64)
    monkeypatch.setattr(host_probes, "WRITTEN", 2**12)


@pytest.mark.usefixtures("calibrated_soon")
@pytest.mark.parametrize("page", slow_but(["docs/tutorials/first-lora.md"], RUN_ON))
def test_the_commands_of_a_page_run_after_the_demo(
    page: str, after_the_demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in [each for each in commands(page) if each.why_not_run() is None]:
        assert execute(command, monkeypatch) in (0, None), f"{command}\n{capsys.readouterr().err}"
        shown = capsys.readouterr().out
        assert shown, command
        if re.search("generate|inference", command.text):
            with Image.open(re.findall(r"^(\S+\.png): ", shown, re.M)[0]) as image:
                assert image.width >= 64 or "--size" in command.text
            assert "peak memory" in shown, command


@pytest.mark.usefixtures("demo")
def test_the_page_names_functions_of_a_step_in_their_order(passed: dict[str, None]) -> None:
    calls = list(passed)
    begins = next(place for place, call in enumerate(calls) if "before_step" in call)
    calls = calls[begins:] + calls[:begins]  # what follows the update in a step stands last
    section = MAP.read_text().partition("## One training step")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py::[\w.]+)`", section)
    assert [name for name in named if name not in calls] == []
    assert named == sorted(named, key=calls.index) and len(named) >= 15


@pytest.fixture(scope="module")
def one_parser() -> Iterator[None]:
    """The command line's parser is made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "parser", functools.cache(command_line.parser))
        yield


@pytest.mark.usefixtures("one_parser")
@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_parsed_and_its_configuration_read(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        try:
            read(command)
        except (SystemExit, UserError) as error:
            raise AssertionError(f"{command}: {error}") from error


def read(command: Command) -> None:
    """Parse a command, and read its configuration."""
    words = command.words()
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), command
    elif words[:3] == ["python", "-m", "benchmarks"]:
        grids_parser().parse_args(words[3:])
    elif words[0] in ("python", "./test.sh"):
        assert (ROOT / words[words[0] == "python"]).is_file(), command
    else:
        if words[0] == "./train.sh":
            words = ["train", *(words[1:] or ["demo"])]
        args = parse(words[words.index("simpletune") + 1 :] if "simpletune" in words else words)
        is_folder = any(word.endswith("/") for word in words)  # a folder: its configuration is written first
        named = getattr(args, "config", None) is not None  # doctor --calibrate needs none
        if named and "bias" not in command.text and not is_folder:  # only the walkthrough has bias
            read_config(args.config, args.overrides, needs_data=False, needs_model=False)


def test_every_reason_not_to_run_a_command_is_in_use() -> None:
    used = {command.why_not_run() for command in SHOWN}
    assert [reason for reason in NOT_RUN.values() if reason not in used] == []


@pytest.mark.slow
def test_a_script_runs_as_a_process(after_the_demo: Path) -> None:
    words = [sys.executable, str(ROOT / "inference" / "base_inference.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(\S+\.png): ", done.stdout, re.M)


def test_the_page_of_commands_names_all_scripts_and_grids() -> None:
    shown = [shlex.split(command.text) for command in commands("docs/reference/commands.md")]
    scripts = {f"inference/{file.name}" for file in (ROOT / "inference").glob("[!_]*.py")}
    assert {words[1] for words in shown if words[1].endswith(".py")} == scripts
    grids = re.search(r"GRID is one of: ([\w,\s-]+?)\n\n", COMMANDS)
    assert grids is not None and set(re.findall(r"[\w-]+", grids[1])) == {name_of(grid) for grid in GRIDS}


def test_the_help_groups_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    grouped = [name for names in VERB_GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(VERBS)
    with pytest.raises(SystemExit) as ended:
        main([])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert [line.strip(":") for line in shown.splitlines() if line.endswith(":")] == [
        *VERB_GROUPS,
        "options",
        "examples",
    ]
    assert re.findall(r"^  (\w+) ", shown.partition("options:")[0], re.M) == grouped


@pytest.mark.parametrize("page", PAGES)
def test_verbs_within_sentences_exist(page: str) -> None:
    assert inline_verbs(page) <= {*VERBS}


def test_the_readme_is_short_and_the_index_names_every_page() -> None:
    assert len(README.splitlines()) <= 90
    index = set(re.findall(r"\]\(([\w-]+/[\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert index == {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} - {"README.md"}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_heading_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)\s]+)", text) if "://" not in link]
    for link in links:
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    if page == "benchmarks/results/speed_log.md":  # names what was tried, and is gone since
        return
    files = set(re.findall(r"`((?:\w+/)*\w+\.py)\b", text)) - DIFFUSERS_SCRIPTS
    known = [file.as_posix() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert [file for file in sorted(files) if not any(f"/{each}".endswith(f"/{file}") for each in known)] == []
