"""Build the documentation as a site: docs/ with the files outside it that pages link to.

    python docs/build_site.py [FOLDER]    build into FOLDER (default: build/site); fails on a link that leads nowhere

Pages are written to be read in the repository, too, so some links leave docs/, which Zensical refuses. A page or
picture that lies outside is copied beside the others, under repository/, and the link points there. Links within such a
copy become plain text, so that copying ends.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
OUTSIDE = "repository"
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s:]+?)(#[\w-]+)?\)")  # relative: no scheme
COLOUR = re.compile(r"\x1b\[[\d;]*m")
CONFIGURATION = DOCS / "zensical.toml"


def copy_with_links(source: Path) -> None:
    """Copy docs/ to a folder, and what its pages link to outside it."""
    shutil.copytree(DOCS, source, ignore=shutil.ignore_patterns("*.py", "*.toml", "__pycache__"))
    (source / "README.md").rename(source / "index.md")
    for page in sorted(source.rglob("*.md")):
        place = DOCS / page.relative_to(source).parent

        def rewritten(link: re.Match[str], page: Path = page, place: Path = place) -> str:
            text, path, anchor = link[1], link[2], link[3] or ""
            target = (place / path).resolve()
            if target == DOCS / "README.md":
                return f"{text}({os.path.relpath(source / 'index.md', page.parent)}{anchor})"
            if target.is_relative_to(DOCS) or not target.is_relative_to(ROOT):
                return link[0]
            if target.is_dir() or not target.exists():
                return text.lstrip("!")[1:-1]
            copy = source / OUTSIDE / target.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if target.suffix == ".md":
                copy.write_text(LINK.sub(lambda inner: inner[1].lstrip("!")[1:-1], target.read_text()))
            else:
                shutil.copy(target, copy)
            return f"{text}({os.path.relpath(copy, page.parent)}{anchor if target.suffix == '.md' else ''})"

        page.write_text(LINK.sub(rewritten, page.read_text()))


def build(site: Path) -> None:
    """Build the site into a folder, which is emptied first."""
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        copy_with_links(work / "docs")
        shutil.copy(CONFIGURATION, work / CONFIGURATION.name)
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if done.returncode:
            sys.exit(COLOUR.sub("", done.stdout + done.stderr))
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(work / "site", site)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site")
