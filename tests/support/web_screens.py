"""Draw the screenshots of docs/images: ``make screens``. Trains the demo model first, to have something to show.

Draws every page in every state, light on a desktop and dark on a phone, as two sheets with captions; some on a desktop
as files of their own, too.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image, ImageDraw, ImageFont
from web_browser import DESKTOP, MISSING, PHONE, Browser, browsing, serving

from simpletune.data.demo import resolve
from simpletune.models.sd3.sd3_files import SD3_MEDIUM

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "images"
PHOTOS = Path(os.environ.get("SIMPLETUNE_TEST_DATA", ROOT.parent / "shared" / "data")) / "dreambooth" / "dog6"
FIRST = "new run, RTX 3070"  # README's first picture, of photos, which are not part of this project
TALLEST = 2400  # pixels
QUIET = 1.5  # seconds until pictures are loaded
STEPS = 60
SHOWN = {
    "runs": "runs",
    "a run, finished": "run",
    "pictures": "data",
}  # files of their own
SHEETS = {DESKTOP: ("desktop", 480, 4), PHONE: ("phone_dark", 240, 7)}  # suffix, pixels of a picture's width, columns
GAP, CAPTION = 24, 28  # pixels


@dataclass
class Film:
    """Pictures with captions, by the browser's size."""

    browser: Browser
    images: dict[tuple[int, int], list[tuple[str, Image.Image]]] = field(
        default_factory=lambda: {DESKTOP: [], PHONE: []}
    )

    def draw(self, caption: str, url: str, folder: str = "", verdict: str = "") -> None:
        """Draw a page as high as it is, in both sizes; ``folder`` is typed into the form of a new run, and ``verdict``
        is what its prediction must say."""
        browser = self.browser
        for size in (DESKTOP, PHONE):
            dark = size == PHONE
            browser.look(dark, size)
            browser.open(url)
            if folder:
                browser.fill('[name="data.path"]', folder)
                browser.until(lambda: browser.text("#why") == "" and "GiB" in browser.text("#live"), "the form", 120)
            if verdict:
                browser.until(
                    lambda: verdict in browser.text("#live") and browser.text("#live-state") == "", verdict, 300
                )
            time.sleep(QUIET)
            if caption == FIRST and PHOTOS.is_dir() and not dark:
                browser.driver.save_screenshot(str(DOCS / "new_run.png"))
                print(DOCS / "new_run.png")
            height = browser.driver.execute_script("return document.documentElement.scrollHeight")
            browser.look(dark, (size[0], min(int(height), TALLEST)))
            time.sleep(QUIET)
            data = browser.driver.get_screenshot_as_png()
            self.images[size].append((caption, Image.open(io.BytesIO(data)).convert("RGB")))
            if caption in SHOWN and not dark:
                file = DOCS / f"web_{SHOWN[caption]}_desktop.png"
                file.write_bytes(data)
                print(file)

    def sheets(self) -> None:
        """Write one sheet for each size."""
        for size, (suffix, width, columns) in SHEETS.items():
            file = DOCS / f"web_film_{suffix}.png"
            sheet(self.images[size], width, columns, size == PHONE).save(file, optimize=True)
            print(file)


def sheet(images: list[tuple[str, Image.Image]], width: int, columns: int, dark: bool) -> Image.Image:
    """Arrange pictures, scaled to a width and cut at three times that height, in columns of the next free place."""
    paper, ink = ("#101214", "#e8e9ea") if dark else ("#e9e9e5", "#1f2328")
    font = ImageFont.load_default(16)
    bottoms, placed = [GAP] * columns, []
    for caption, image in images:
        small = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
        small = small.crop((0, 0, width, min(small.height, 3 * width)))
        column = bottoms.index(min(bottoms))
        placed.append((caption, small, GAP + column * (width + GAP), bottoms[column]))
        bottoms[column] += CAPTION + small.height + GAP
    found = Image.new("RGB", (GAP + columns * (width + GAP), max(bottoms)), paper)
    draw = ImageDraw.Draw(found)
    for caption, small, x, y in placed:
        draw.text((x, y), caption, ink, font)
        found.paste(small, (x, y + CAPTION))
    return found.quantize(192)


@contextmanager
def started(url: str, browser: Browser, name: str, *values: tuple[str, str, object], end: str) -> Iterator[None]:
    """Start a run as a newcomer does; at the end wait until its card says how it ended."""
    browser.look(False, DESKTOP)
    browser.open(f"{url}/start")
    browser.fill('[name="data.path"]', "pictures")
    browser.fill('[name="trigger"]', "glim")
    named = lambda: browser.find('[name="name"]').get_attribute("value")  # noqa: E731
    browser.until(lambda: named() == "pictures" and "glim" in browser.raw("#rest"), "the folder's settings")
    browser.click("#everything > summary")
    for section, field_name, value in (("general", "name", name), *values):
        if section != "general":  # the name is in view
            browser.click(f"#d-{section} > summary")
        path = field_name if section == "general" else f"{section}.{field_name}"
        browser.fill(f'[name="{path}"]', str(value))
        browser.until(lambda section=section: "yours" in browser.text(f"#c-{section}"), section)
    browser.until(lambda: browser.text("#why") == "" and browser.text("#live-state") == "", "the form", 120)
    browser.click("#go")
    browser.until(lambda: "/start" not in browser.driver.current_url, "the queue")
    yield
    browser.look(False, DESKTOP)
    browser.open(f"{url}/")
    browser.until(lambda: end in browser.text(f'[data-run="{name}"]'), f"the end: {end}", 600)


def main() -> int:
    """Draw all pages."""
    if MISSING:
        print(f"no browser: {' and '.join(MISSING)} missing", file=sys.stderr)
        return 2
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # commands without our paths
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(resolve("demo:pictures", Path(folder) / "cache"), Path(folder) / "pictures")
        photos = Path(folder) / "photos"
        shutil.copytree(PHOTOS if PHOTOS.is_dir() else Path(folder) / "pictures", photos)
        with serving(Path(folder)) as server, browsing() as browser:
            film, url = Film(browser), server.url
            film.draw("no runs yet", f"{url}/")
            film.draw("new run", f"{url}/start")
            film.draw("new run, filled in", f"{url}/start", "pictures")
            query = {"folder": photos.name, "card": "RTX3070", "trigger": "sks dog", "model.pretrained": SD3_MEDIUM}
            film.draw(FIRST, f"{url}/start?{urlencode(query)}", verdict="Fits")
            film.draw("choose pictures", f"{url}/data")
            film.draw("pictures", f"{url}/data?place=pictures")
            lengths = ("train", "steps", STEPS), ("validation", "every", 10)
            with started(url, browser, "glim", *lengths, end="finished"):
                browser.until(lambda: "/run/glim" in browser.driver.current_url, "the run's page", 120)
                film.draw("a run, training", f"{url}/run/glim")
            film.draw("a run, finished", f"{url}/run/glim")
            with started(url, browser, "glim-fast", *lengths, ("optimizer", "lr", 0.01), end="finished"):
                film.draw("a run in the queue", f"{url}/")
            with started(url, browser, "diverged", *lengths, ("optimizer", "lr", 100), end="failed"):
                pass
            film.draw("a run, failed", f"{url}/run/diverged")
            film.draw("runs", f"{url}/")
            film.draw("a page that is not there", f"{url}/run/none")
            film.sheets()
    return 0


if __name__ == "__main__":
    sys.exit(main())
