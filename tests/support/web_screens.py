"""Draw the screenshots of docs/images: ``make screens``. Trains the demo model first, to have something to show."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from web_browser import DESKTOP, MISSING, PHONE, Browser, browsing, serving

from simpletune.data.demo import resolve

DOCS = Path(__file__).resolve().parents[2] / "docs" / "images"
TALLEST = 2400  # pixels
QUIET = 1.5  # seconds until pictures are loaded
STEPS = 60


def train(url: str, browser: Browser) -> None:
    """Start a run as a newcomer does, and wait for its end."""
    browser.open(f"{url}/start")
    browser.fill('[name="data.path"]', "pictures")
    browser.fill('[name="trigger"]', "glim")
    browser.click("#everything > summary")
    for section, name, value in (("train", "steps", STEPS), ("validation", "every", 10)):
        browser.click(f"#d-{section} > summary")
        browser.fill(f'[name="{section}.{name}"]', str(value))
        browser.until(lambda section=section: "yours" in browser.text(f"#c-{section}"), section)
    browser.until(lambda: browser.text("#to-mend") == "" and browser.text("#live-state") == "", "the form", 120)
    browser.click("#go")
    browser.until(lambda: "/start" not in browser.driver.current_url, "the queue")
    browser.open(f"{url}/")
    browser.until(lambda: "finished" in browser.text("#queue"), "the run's end", 600)


def draw(url: str, browser: Browser, name: str, path: str, size: tuple[int, int], dark: bool) -> None:
    """Draw a page as high as it is."""
    browser.look(dark, size)
    browser.open(url + path)
    if path == "/start":
        browser.fill('[name="data.path"]', "pictures")
        browser.until(lambda: browser.text("#to-mend") == "" and "GiB" in browser.text("#live"), "the form", 120)
    time.sleep(QUIET)
    height = browser.driver.execute_script("return document.documentElement.scrollHeight")
    browser.look(dark, (size[0], min(int(height), TALLEST)))
    time.sleep(QUIET)
    file = DOCS / f"web_{name}_{'phone' if size == PHONE else 'desktop'}{'_dark' if dark else ''}.png"
    browser.driver.save_screenshot(str(file))
    print(file)


def main() -> int:
    """Draw all pages, light on a desktop and dark on a phone."""
    if MISSING:
        print(f"no browser: {' and '.join(MISSING)} missing", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(resolve("demo:pictures", Path(folder) / "cache"), Path(folder) / "pictures")
        with serving(Path(folder)) as server, browsing() as browser:
            train(server.url, browser)
            pages = {"start": "/start", "runs": "/", "run": "/run/pictures", "data": "/data?place=pictures"}
            for name, path in pages.items():
                draw(server.url, browser, name, path, DESKTOP, dark=False)
                draw(server.url, browser, name, path, PHONE, dark=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
