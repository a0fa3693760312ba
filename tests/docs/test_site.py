"""The documentation as a site: generated pages are fresh, links lead somewhere, nothing comes from other hosts."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning."""
    place = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run([sys.executable, str(DOCS / "build_site.py"), str(place)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")} - {Path("README.html")}
    assert [page for page in sorted(pages) if not (site / page).is_file()] == []
    assert (site / "index.html").is_file()


def test_a_link_that_leaves_the_folder_leads_to_a_copy(site: Path) -> None:
    results = re.findall(r'href="(\.\./repository/[^"#]+)', (site / "explanation" / "scaling.html").read_text())
    assert results and all((site / "explanation" / link).is_file() for link in results)


def test_the_site_asks_no_other_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:link|script|img)[^>]+(?:src|href)="(https?://[^"]+)', page.read_text())
        assert loaded == [], page


def test_a_broken_link_is_refused(tmp_path: Path) -> None:
    build = runpy.run_path(str(DOCS / "build_site.py"))
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "README.md").write_text("# Here\n\n[there](no-such-page.md)\n")
    (folder / "zensical.toml").write_text((DOCS / "zensical.toml").read_text())
    build["build"].__globals__.update(DOCS=folder, ROOT=tmp_path, CONFIGURATION=folder / "zensical.toml")
    with pytest.raises(SystemExit, match="does not exist"):
        build["build"](tmp_path / "site")
