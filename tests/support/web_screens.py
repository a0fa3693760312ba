"""Draw the screenshots of docs/images: ``make screens``. Trains the demo model first, to have something to show.

Draws every page in every state, light on a desktop and dark on a phone, as two sheets with captions; some on a desktop
as files of their own, too; and what the page says of a base on the Hub, as a strip (``web_screens.py hub``: only it).
"""

from __future__ import annotations

import io
import json
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

import fake_hub
from fake_hub import Failure, FakeHub
from PIL import Image, ImageDraw, ImageFont
from web_browser import DESKTOP, MISSING, PHONE, Browser, browsing, serving

from benchmarks.tiny_models import tiny_sd3
from simpletune.data.demo import resolve
from simpletune.models.sd3.sd3_files import SD3_MEDIUM
from simpletune.system.hub import MIB

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


SIZES = {"transformer": 4.17, "vae": 0.17, "text_encoder": 0.25, "text_encoder_2": 1.39, "text_encoder_3": 9.52}
"""GB of the weights of SD3 Medium, which the made-up Hub tells of its tiny ones."""
NARROW = (520, 900)  # pixels of a window: text stays readable on a phone


class Gated(FakeHub):
    """A made-up Hub with a tiny SD3 Medium that tells the real one's sizes."""

    def listing(self) -> bytes:
        found = json.loads(super().listing())
        for each in found["siblings"]:
            if "lfs" in each:
                each["size"] = each["lfs"]["size"] = int(SIZES[each["rfilename"].partition("/")[0]] * 1e9)
        return json.dumps(found).encode()


def hub_states(folder: Path, browser: Browser) -> None:
    """Draw what New run says of SD3 Medium: of token, licence and download."""
    images: list[tuple[str, Image.Image]] = []
    token = folder / "token"
    variables = {"HF_HOME": ".cache/huggingface", "HF_TOKEN_PATH": token}  # shown: relative to the server's folder
    variables |= {"HF_HUB_DISABLE_XET": 1, "HF_HUB_DOWNLOAD_TIMEOUT": 600}
    tiny_sd3.build(base := folder / "base", tiny_sd3.MINIMAL, seed=1, dtype="fp32")
    (base / "model_index.json").write_text("{}")
    with fake_hub.serve(base, kind=Gated) as hub:
        hub.name = SD3_MEDIUM
        os.environ.update({name: str(value) for name, value in variables.items()}, HF_ENDPOINT=hub.url)
        with serving(folder) as server:
            browser.look(False, NARROW)
            query = {"folder": "pictures", "model.pretrained": SD3_MEDIUM}

            def draw(caption: str, words: str, failure: Failure | None = None) -> None:
                hub.failure = failure
                browser.open(f"{server.url}/start?{urlencode(query)}")
                take(caption, words)

            def take(caption: str, words: str) -> None:
                browser.until(lambda: words in browser.text("#hub"), words)
                time.sleep(QUIET)
                browser.driver.execute_script("document.querySelector('#hub').style.padding = '12px'")
                data = browser.find("#hub").screenshot_as_png
                images.append((caption, Image.open(io.BytesIO(data)).convert("RGB")))

            draw("No token", "needs a token", Failure(401, "GatedRepo", on="resolve"))
            draw("No network", "is unknown", Failure("close", on="resolve"))
            token.write_text(fake_hub.TOKEN)
            draw("A token, but the licence is not accepted", "licence", Failure(403, "GatedRepo", on="resolve"))
            draw("Ready", "may be downloaded")
            hub.files["text_encoder_2/model.safetensors"] = bytes(3 * MIB)  # the bar moves with megabytes that arrive
            hub.delay = 0.3
            browser.click("#hub-download")
            browser.until(lambda: "text_encoder_2/model.safetensors" in hub.sent, "two parts and a half")
            hub.failure, hub.delay = Failure("stall", on="weights", method="GET"), 0.0
            browser.until(lambda: "0.0 of" not in browser.text("#hub-far"), "the bar")
            take("Downloading", "of 14")
            browser.click("#hub-pause")
            take("Paused", "Paused")
    file = DOCS / "web_hub_states.png"
    sheet(images, max(image.width for _, image in images), 1, False).save(file, optimize=True)
    print(file)


def main() -> int:
    """Draw all pages."""
    if MISSING:
        print(f"no browser: {' and '.join(MISSING)} missing", file=sys.stderr)
        return 2
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # commands without our paths
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(resolve("demo:pictures", Path(folder) / "cache"), Path(folder) / "pictures")
        if sys.argv[1:] == ["hub"]:
            with browsing() as browser:
                hub_states(Path(folder), browser)
            return 0
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
            hub_states(Path(folder), browser)
    return 0


if __name__ == "__main__":
    sys.exit(main())
