"""Every code block of README, CONTRIBUTING and docs is accounted for: run, read, or left out for a reason.

``test_readme.py`` runs and parses simpletune's own commands; here bash says what else a reader would run.
"""

from __future__ import annotations

import ast
import configparser
import importlib
import json
import re
import shlex
import subprocess
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from documented import COMMAND, LANGUAGES, PAGES, Block, code_blocks, commands, simple_commands, without_choices

from simpletune.apps.cli.main import VERBS
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.data import demo as demo_data
from simpletune.data.sources.folder import Folder
from simpletune.system.options import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Why a line that begins so is not run.
OTHERS = {
    "cd": "changes the folder",
    "curl": "asks a server that a page has started (test_serve.py)",
    "docker": "needs Docker (test_container.py)",
    "export": "sets a variable of the reader's",
    "git": "needs the address of a repository (test_update.py)",
    "hf": "needs an account of the Hub",
    "kubectl": "needs a cluster (test_launch_files.py)",
    "nvidia-smi": "asks the driver",
    "pip": "installs; the extras exist",
    "python": "a test of the reader's (test_docs.py runs the listings)",
    "python3": "asks for the version",
    "sbatch": "needs a cluster (test_launch_files.py)",
    "scp": "needs another machine",
    "sky": "needs a cloud (test_launch_files.py)",
    "sleep": "waits",
    "ssh": "needs another machine",
    "sudo": "installs for all users",
    "systemctl": "needs systemd",
    "tensorboard": "serves until it is stopped",
    "tmux": "needs a terminal",
}
RUN = {"cp", "ln", "mkdir", "mv"}
FRAGMENT = re.compile(r'^\s*"')


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_fenced_and_names_its_language(page: str) -> None:
    assert [
        f"{block}: {block.language or 'indented'}" for block in code_blocks(page) if block.language not in LANGUAGES
    ] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_run_parsed_or_left_out_for_a_reason(page: str) -> None:
    known = {plain(command.text) for command in commands(page)}
    for line in simple_commands([block.script for block in code_blocks(page)]):
        line = re.sub(r"^(?:\w+=\S* )+(?=\S)", "", line)  # variables of one command
        if COMMAND.match(line):
            assert plain(line) in known, f"{page}: {line}: found by bash alone"
        else:
            account_for(page, line)


def plain(line: str) -> str:
    """A command as both ways of reading a page give it: no redirection, no quotes."""
    text = re.sub(r" [12&]?>.*", "", without_choices(line))
    return " ".join(shlex.split(text)).removeprefix(".venv/bin/")


def account_for(page: str, line: str) -> None:
    """Check a line of another program. Lines in ``RUN`` run in another test."""
    program = line.split()[0]
    if program.endswith(".sh"):
        assert (ROOT / program).is_file(), f"{page}: {line}"
        return
    name = program.removeprefix(".venv/bin/")
    assert name in OTHERS or name in RUN, f"{page}: {line}: run it in a test, or say in OTHERS why not"
    if program != name and name not in ("pip", "python"):
        declared = " ".join(PROJECT["dependencies"]).replace("-", "_")
        assert {"hf": "huggingface_hub"}.get(name, name) in declared, f"{page}: {line}"
    for names in re.findall(r"(?:simpletune|\.)\[([\w,]+)\]", line):
        assert set(names.split(",")) <= set(PROJECT["optional-dependencies"]), f"{page}: {line}"
    for verb in re.findall(r"-m simpletune (\w+)", line):
        assert verb in VERBS, f"{page}: {line}"


def test_copies_that_pages_make_of_the_demo_s_pictures_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    demo_data.resolve("demo:style", Path(".cache"))
    lines = [line for page in PAGES for line in simple_commands([block.script for block in code_blocks(page)])]
    copied = [line for line in lines if line.split()[0] in RUN]
    for line in copied:
        subprocess.run(["bash", "-ec", line], check=True)
    assert "cp -r .cache/demo/style-v* pictures" in copied
    assert len(Folder(path="pictures").scan(Path("pictures")).images) == 64


def read_json(block: Block) -> None:
    """Read JSON, or members of an object; sections of a configuration have fields that exist."""
    text = re.sub(r",?\s*\.\.\.", "", block.text).strip().rstrip(",")
    found = json.loads(f"{{{text}}}" if FRAGMENT.match(text) else text)
    if isinstance(found, dict) and found and set(found) <= {"$schema", *TrainConfig.model_fields}:
        try:
            validate(json.loads((ROOT / "configs" / "demo.json").read_text()) | found, str(block))
        except ConfigError as error:  # what else it lacks may stand in another section
            assert [str(each) for each in error.problems if "unknown field" in str(each)] == []


def read_python(block: Block) -> None:
    """Parse Python, and find what it imports from simpletune; another listing of the page may define it. An excerpt,
    with lines of three dots, stands in a file."""
    parts = [part.strip("\n") for part in re.split(r"^ *\.\.\.$", block.text, flags=re.M)]
    if len(parts) > 1:
        files = (file for folder in ("simpletune", "tests") for file in (ROOT / folder).rglob("*.py"))
        assert any(all(part in source for part in parts) for source in map(Path.read_text, files))
        return
    for node in ast.walk(ast.parse(textwrap.dedent(block.text))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("simpletune"):
            file = f"{str(node.module).replace('.', '/')}.py"
            if f"**{file}**" not in (ROOT / block.page).read_text():
                module = importlib.import_module(str(node.module))
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


READERS: dict[str, Callable[[Block], object]] = {
    "json": read_json,
    "python": read_python,
    "toml": lambda block: tomllib.loads(block.text),
    "yaml": lambda block: list(yaml.safe_load_all(block.text)),
    "ini": lambda block: configparser.ConfigParser(allow_no_value=True, strict=False).read_string(block.text),
}


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in code_blocks(page) if block.language in READERS], ids=str
)
def test_a_block_of_another_language_can_be_read(block: Block) -> None:
    READERS[block.language](block)


def test_bash_says_what_a_page_runs() -> None:
    script = "until simpletune train CONFIG; do sleep 60; done  # again\nX=1 a 'b c' | d > e\nfor i in 1 2; do f; done"
    assert simple_commands([script]) == ["simpletune train CONFIG", "X=1 a 'b c'", "d > e", "f", "f"]
    with pytest.raises(AssertionError, match="unexpected EOF"):
        simple_commands(["echo 'a"])
    page = Block("a page", "text", "$ simpletune check demo \\\n  train.steps=3\n  model\n", 1)
    assert simple_commands([page.script]) == ["simpletune check demo train.steps=3"]
