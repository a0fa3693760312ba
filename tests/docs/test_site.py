"""The documentation as a site: generated pages are fresh, links lead somewhere, nothing comes from other hosts."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


@pytest.mark.parametrize("name", ["commands.md", "configuration.md", "import-keys.md"])
def test_a_page_says_what_the_code_says(name: str, generate: dict[str, Any]) -> None:
    assert set(generate["PAGES"]) == {"commands.md", "configuration.md", "import-keys.md"}
    assert (DOCS / "reference" / name).read_text() == generate["page"](name), "stale: make docs"


@pytest.fixture
def builder() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "build_site.py"))


def test_every_page_is_copied_with_what_it_links_to(builder: dict[str, Any], tmp_path: Path) -> None:
    builder["copy_with_links"](tmp_path / "docs")
    pages = {page.relative_to(DOCS) for page in DOCS.rglob("*.md")} - {Path("README.md")} | {Path("index.md")}
    assert [page for page in sorted(pages) if not (tmp_path / "docs" / page).is_file()] == []
    copied = [*(tmp_path / "docs").rglob("*.md")]
    links = {
        page: [link[2] for link in builder["LINK"].finditer(page.read_text()) if link[2][0] != "#"] for page in copied
    }
    assert [(page, link) for page in copied for link in links[page] if not (page.parent / link).is_file()] == []
    outside = [link for link in links[tmp_path / "docs" / "how-to" / "several-machines.md"] if "../repository/" in link]
    assert outside, "results of benchmarks"


@pytest.fixture
def small(builder: dict[str, Any], tmp_path: Path) -> Path:
    """A folder of documentation with one page, built with the settings of all."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "zensical.toml").write_text((DOCS / "zensical.toml").read_text())
    (folder / "README.md").write_text("# Here\n\n[the same](#here)\n")
    builder["build"].__globals__.update(DOCS=folder, ROOT=tmp_path, CONFIGURATION=folder / "zensical.toml")
    return folder


def loaded_from_elsewhere(site: Path) -> list[str]:
    """What pages load from other hosts."""
    tag = re.compile(r'<(?:link|script|img)[^>]+(?:src|href)="(https?://[^"]+)')
    return [url for page in site.rglob("*.html") for url in tag.findall(page.read_text())]


def test_a_site_asks_no_other_host(small: Path, builder: dict[str, Any], tmp_path: Path) -> None:
    builder["build"](tmp_path / "site")
    assert (tmp_path / "site" / "index.html").is_file() and loaded_from_elsewhere(tmp_path / "site") == []


def test_a_broken_link_is_refused(small: Path, builder: dict[str, Any], tmp_path: Path) -> None:
    (small / "README.md").write_text("# Here\n\n[there](no-such-page.md)\n")
    with pytest.raises(SystemExit, match="does not exist"):
        builder["build"](tmp_path / "site")


@pytest.mark.slow
def test_the_whole_site_is_built_without_a_warning(builder: dict[str, Any], tmp_path: Path) -> None:
    builder["build"](tmp_path / "site")
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")} - {Path("README.html")}
    assert [page for page in sorted(pages) if not (tmp_path / "site" / page).is_file()] == []
    assert (tmp_path / "site" / "index.html").is_file() and loaded_from_elsewhere(tmp_path / "site") == []
