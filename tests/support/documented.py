"""The commands that README, CONTRIBUTING and docs show: how to find and parse them, and why some are not run."""

from __future__ import annotations

import re
import shlex
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
        text = re.sub(r"\[[^\]]*\.\.\.\]|\[@STEP\]", "", self.text)
        text = re.sub(r"\|\w+|[\[\]]| >.*", "", text)
        return shlex.split(text.replace("CONFIG", "demo").replace("GRID", "memory"))


def commands(page: str) -> list[Command]:
    """All commands in a page's code blocks; where a block has lines that begin with ``$``, only these."""
    return [command for block in blocks(page) for command in _commands_of(page, block)]


def blocks(page: str) -> Iterator[list[str]]:
    """The code blocks of a page."""
    return _blocks((ROOT / page).read_text())


def inline_verbs(page: str) -> set[str]:
    """The verbs of commands within sentences."""
    return set(re.findall(r"`simpletune ([a-z]+)\b", (ROOT / page).read_text()))


def _blocks(text: str) -> Iterator[list[str]]:
    """Code blocks, fenced or indented; an empty line ends one."""
    block: list[str] = []
    fenced = False
    for line in [*text.splitlines(), ""]:
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        if line.strip() and not fence and (fenced or line.startswith("    ")):
            block.append(line)
        elif block:
            yield block
            block = []


def _commands_of(page: str, block: list[str]) -> Iterator[Command]:
    joined = re.sub(r"\\\n\s*", "", "\n".join(block)).splitlines()
    prompted = [line.lstrip()[2:] for line in joined if line.lstrip().startswith("$ ")]
    for line in prompted or joined:
        found = COMMAND.fullmatch(line)
        if found:
            line, _, comment = found[1].partition(" #")
            text = re.split(r"\s{3,}", line.strip())[0].removesuffix("; do")
            yield Command(page, re.sub(r" +", " ", text).removeprefix(".venv/bin/"), comment.strip())
