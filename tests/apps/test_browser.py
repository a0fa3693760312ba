"""The pages of ``web`` and of ``serve`` in a headless Chromium, one for all: accessible, silent, errors in words."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
import web_browser
from serving import PROMPT, BlockingGenerator, Running, blocking, element, running, until
from slow_cases import slow_but
from web_browser import DESKTOP, PHONE, Browser, make_root, needs_browser
from web_pages import address_of, pages_served

from simpletune.apps.serve.limits import Limits
from simpletune.apps.serve.requests import ServedImage
from simpletune.apps.web import live, queue
from simpletune.stages.sample import ImageRequest

pytestmark = needs_browser


browser, shared_browser = web_browser.browser, web_browser.shared_browser


# The pages of web


PAGES = ("/", "/start", "/start?file=hostile.json", "/start?from=old", "/run/old", "/data", "/queued/none")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of pages that predict and start nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.Estimator, "want", lambda *_: None)
        patch.setattr(queue, "ensure_runner", lambda _: None)
        with pages_served(make_root(tmp_path_factory.mktemp("root"))) as server:
            host, port = address_of(server)
            yield f"http://{host}:{port}"


@pytest.mark.parametrize("path", slow_but(["/", "/start", "/run/old", "/data"], PAGES))
def test_every_page_is_accessible_silent_and_stays_on_the_server(address: str, browser: Browser, path: str) -> None:
    browser.look(False, DESKTOP)
    browser.open(address + path)
    if path == "/start":
        browser.driver.execute_script("document.querySelectorAll('details').forEach((each) => each.open = true)")
    assert browser.violations() == []
    browser.look(True, PHONE)
    assert browser.violations("color-contrast") == []
    assert browser.overflow() <= 0
    browser.look(False, DESKTOP)
    assert [each for each in browser.complaints() if not ("404" in each and path in each)] == []
    assert "owned" not in browser.driver.title


def test_what_a_script_has_styled_is_refreshed_without_an_inline_style(address: str, browser: Browser) -> None:
    """The policy forbids those, and each that htmx would copy is an error in the console."""
    browser.open(f"{address}/run/old")
    browser.driver.execute_script("""
      document.getElementById("pictures-heading").style.setProperty("--cut", "20%");
      document.getElementById("run-pictures").addEventListener("htmx:afterSettle", () => { window.settled = true; });
      htmx.trigger(document.getElementById("run-pictures"), "changed");""")
    browser.until(lambda: browser.driver.execute_script("return window.settled"), "the pictures anew")
    assert browser.complaints() == []


STREAMS = """
window.streams = [];
window.EventSource = class {
  constructor() { this.heard = {}; this.closed = false; streams.push(this); }
  addEventListener(name, hear) { this.heard[name] = hear; }
  close() { this.closed = true; }
  say(name) { this.heard[name]({data: "[]"}); }
};
const later = window.setTimeout;
window.setTimeout = (call, ms, ...more) => later(call, ms === 45000 ? 400 : ms, ...more);  // a hundredth of the time
"""


def test_a_stream_that_has_died_in_silence_is_replaced(address: str, browser: Browser) -> None:
    """Beats keep it; without them the page says that it is not connected, and refreshes what it shows afterwards."""
    run = browser.driver.execute_script
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": STREAMS})
    try:
        browser.open(f"{address}/")
        browser.until(lambda: run("return streams.length === 1"), "a stream")
        run("""streams[0].say("hello"); window.refreshed = 0;
            document.querySelector("[data-topic]").addEventListener("changed", () => { refreshed += 1; });
            window.beats = setInterval(() => streams[0].say("beat"), 50);""")
        time.sleep(1)
        assert run("return [streams.length, streams[0].closed]") == [1, False]
        assert browser.text("#connection") == "live"
        run("clearInterval(beats)")
        browser.until(lambda: run("return streams.length > 1 && streams[0].closed"), "another stream")
        assert browser.text("#connection") == "not connected; trying again" and run("return refreshed") == 0
        run('streams.at(-1).say("hello")')
        assert browser.text("#connection") == "live" and run("return refreshed") == 1
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


# The page of serve


class Painter(BlockingGenerator):
    """Draws a colour that tells seed, LoRA and strength."""

    def colour(self, image: ServedImage) -> str:
        return f"#{image.request.seed:02x}{len(image.lora):02x}{round(image.scale * 100):02x}"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """A server of a base and two LoRAs."""
    service = blocking(Painter(blocked=False), Limits(side=128), names=("base", "first", "second"))
    with running(service) as it:
        it.wait_ready()
        yield it


def drawn(browser: Browser, it: Running, **fields: object) -> str:
    """The page after it has drawn what its address says, or has said why not."""
    browser.open(f"{it.service.address}?{urlencode({'run': 1, **fields})}")
    browser.until(lambda: browser.text("#about") or browser.text("#error"))
    return str(browser.driver.page_source)


def test_it_shows_base_beside_lora_from_the_same_noise(served: Running, browser: Browser) -> None:
    text = drawn(browser, served, prompt=PROMPT, seed=11, scale=0.5)
    shown = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', text)]
    asked = {"prompt": PROMPT, "seed": 11}
    answer = served.predict({**asked, "lora": "base"}, {**asked, "lora": "first", "lora_scale": 0.5})
    assert shown == [base64.b64decode(data) for data in answer.json()["predictions"]]
    assert len(set(shown)) == 2
    assert "first × 0.5" in element(text, "after") and f'alt="base: {PROMPT}"' in element(text, "before")
    assert 'class="beside"' in element(text, "pictures") and "hidden" in element(text, "cutter").split(">")[0]
    assert re.search(
        r"seed 11, 3 steps, guidance 3, 64 × 64, drawn in [\d.]+ s, waited [\d.]+ s", element(text, "about")
    )
    assert re.search(r'<option value="second">', text) and "2 LoRAs and the base" in text


def test_the_slider_cuts_where_it_is_put(served: Running, browser: Browser) -> None:
    text = drawn(browser, served, prompt=PROMPT, view="slider", cut=30)
    assert 'class="slider"' in element(text, "pictures") and "--cut: 30%" in element(text, "pictures")
    assert "hidden" not in element(text, "cutter").split(">")[0]


def test_errors_are_shown_in_words_and_are_no_markup(served: Running, browser: Browser) -> None:
    text = drawn(browser, served, prompt=PROMPT, width=1000, seed=-1)
    error = element(text, "error")
    assert "hidden" not in error.split(">")[0]
    assert (
        "<li>Width: 1000 does not fit. It must be at most 128.</li>" in error
        and "<li>Seed: -1 does not fit. It must be at least 0.</li>" in error
    )
    assert 'src="data:image/png' not in text


def test_a_full_queue_is_shown(browser: Browser) -> None:
    generator = BlockingGenerator(steps=100_000)
    with running(blocking(generator, Limits(queue=1))) as it:
        it.wait_ready()
        it.service.worker.submit([ServedImage(ImageRequest("a", 1))])
        until(lambda: len(generator.started) == 1)
        it.service.worker.submit([ServedImage(ImageRequest("b", 1))])
        text = drawn(browser, it, prompt='<img src=x onerror="document.title=1">')
        assert "full with 1 requests" in element(text, "error")


def test_the_page_shows_the_base_beside_a_full_model_which_has_no_strength(browser: Browser) -> None:
    service = blocking(Painter(blocked=False), names=("base", "whole", "second"), tuned="whole")
    with running(service) as it:
        it.wait_ready()
        text = drawn(browser, it, prompt=PROMPT, seed=3)
    assert "whole (full model), 1 LoRA and the base" in text and ">Model</span>" in text
    assert f'alt="base: {PROMPT}"' in element(text, "before") and f'alt="whole: {PROMPT}"' in element(text, "after")
    assert "×" not in element(text, "after").split("figcaption")[1]
    assert ">whole</option>" in text and ">base only</option>" in text
    assert "disabled" in text[text.index('id="scale"') :].split(">")[0]
