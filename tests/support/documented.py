"""The code blocks and commands that README, CONTRIBUTING and docs show: how to find them, and why some are not run."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
]
STARTS = r"(?:\.venv/bin/)?simpletune |\./(?:train|test)\.sh|python -m benchmarks|python inference/|torchrun |make "
COMMAND = re.compile(rf"\s*(?:until )?((?:{STARTS}).*)")
LANGUAGES = ("bash", "json", "text", "python", "toml", "yaml", "ini")
"""What a block may be: commands, data, output or code. In ``text`` a line that begins with ``$`` is a command."""
SYNOPSIS = r"\b(CONFIG|GRID|RUN|FILE|FOLDER|LORA|LOKR|MODEL|BASE)\b|A:0\.7"

# Why a command is parsed and not run, by what it contains. A comment with "needs" in the page is a reason, too.
NOT_RUN = {
    r"\bbias\b|_bias\b|^simpletune .*schema >": "of the walkthrough (tests/docs/test_docs.py runs its listings)",
    SYNOPSIS: "a synopsis",
    r"^simpletune (estimate|plan)": "predicts for 20 s, searches for minutes (test_estimate.py, test_planning.py)",
    r"sd3_medium|sd35_|sd21_|sd15_|stabilityai/|openai/": "needs the hub",
    r"^python -m benchmarks": "takes minutes (test_bench.py, test_bench_speed.py, test_study.py)",
    r"^\./(train|test)\.sh": "installs (test_setup.py)",
    r"^make ": "for contributors; the target exists",
    r"^simpletune caption": "needs an image-to-text model (test_captioning.py)",
    r"^simpletune doctor(?! --calibrate)": "examines this machine, which may lack anything (test_doctor.py)",
    r"^simpletune (serve|web)": "serves until it is stopped (test_serve.py, test_web_page.py)",
    r"\b(a|b|other)\.safetensors|\bmerged|runs/(?!demo)": "needs other runs (test_lora_tools.py, test_report.py)",
}


@dataclass(frozen=True)
class Command:
    """One command line of a page.

    Args:
        page: relative to the repository.
        text: without the comment; continued lines are joined.
        comment: what follows ``#``.
    """

    page: str
    text: str
    comment: str = ""

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    def why_not_run(self) -> str | None:
        """The reason, from the page's comment or from the table; None: it is run."""
        if re.search(r"\bneeds (?!no\b)", self.comment):
            return self.comment
        return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, self.text)), None)

    def words(self) -> list[str]:
        """The words, with placeholders filled in, optional arguments given and lists left out."""
        text = re.sub(r" >.*", "", without_choices(self.text))
        return shlex.split(text.replace("CONFIG", "demo").replace("GRID", "memory"))


def without_choices(text: str) -> str:
    """A synopsis without what may be left out: lists, further choices, and brackets of optional arguments."""
    if not re.search(SYNOPSIS, text):
        return text
    text = re.sub(r"\[[^\]]*\.\.\.\]|\[@STEP\]", "", text)
    return re.sub(r"(?<=\w)\|\w+|[\[\]]", "", text)


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Args:
        language: after the opening fence; empty for a block that is only indented.
    """

    page: str
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def typed(self) -> str:
        """What a reader types: all of a block in bash; of one that shows output the lines that begin with ``$``."""
        if self.language == "bash":
            return self.text
        prompted = re.findall(r"^\s*\$ ((?:.*\\\n)*.*)", self.text, re.M) if self.language == "text" else []
        return "\n".join(prompted)

    @property
    def script(self) -> str:
        """What a reader types, of a synopsis one choice."""
        return "\n".join(map(without_choices, self.typed.splitlines()))


def code_blocks(page: str) -> list[Block]:
    """The code blocks of a page: fenced ones, and those of four spaces after an empty line."""
    found, opened, before = [], None, ""
    lines = (ROOT / page).read_text().splitlines()
    for number, line in enumerate([*lines, ""]):
        fence = re.match(r"\s*```(.*)", line)
        if opened is None and fence:
            opened = number
        elif opened is not None and (fence or number == len(lines)):
            indent = re.match(r"\s*", lines[opened])[0]  # type: ignore[index]
            text = "\n".join(each.removeprefix(indent) for each in lines[opened + 1 : number])
            language = lines[opened].strip().removeprefix("```") if fence else ""
            found.append(Block(page, language, text, opened + 1))
            opened = None
        elif opened is None and line.startswith("    ") and not before.strip():
            found.append(Block(page, "", line, number + 1))
        before = line
    return found


# Says every simple command and runs none: with extdebug, a trap that fails prevents the command that it was called for.
NOTHING_RUNS = r"""
exec 3>&1 >/dev/null
shopt -s extdebug
set -T
trap '((++count < 1000)) || exit; printf "%s\0" "$BASH_COMMAND" >&3; [[ $BASH_COMMAND == "for "* ]]' DEBUG
"""


def simple_commands(scripts: list[str]) -> list[str]:
    """The simple commands of scripts as bash reads them, of loops and conditions too. Raises AssertionError if bash
    cannot read them."""
    script = NOTHING_RUNS + "\n".join(scripts)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert not done.stderr, done.stderr
    return [each for each in done.stdout.split("\0") if each and not each.startswith("for ")]


def commands(page: str) -> list[Command]:
    """All commands in a page's code blocks that are simpletune's own."""
    return [command for block in code_blocks(page) for command in _commands_of(block)]


def inline_verbs(page: str) -> set[str]:
    """The verbs of commands within sentences."""
    return set(re.findall(r"`simpletune ([a-z]+)\b", (ROOT / page).read_text()))


def _commands_of(block: Block) -> Iterator[Command]:
    for line in re.sub(r"\\\n\s*", "", block.typed).splitlines():
        found = COMMAND.fullmatch(line)
        if found:
            line, _, comment = found[1].partition(" #")
            text = re.split(r"\s{3,}", line.strip())[0].removesuffix("; do")
            yield Command(block.page, re.sub(r" +", " ", text).removeprefix(".venv/bin/"), comment.strip())
