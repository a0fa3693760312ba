"""The page of ``simpletune serve`` in a real browser: it draws, compares, explains errors, loads nothing."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import (
    PROMPT,
    BlockingGenerator,
    Running,
    blocking,
    dom,
    element,
    make_run,
    needs_browser,
    real,
    running,
    until,
)

from simpletune.apps.serve.app import PAGE
from simpletune.apps.serve.limits import Limits
from simpletune.apps.serve.requests import ImageRequest
from simpletune.stages.sample import PictureRequest


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    run = make_run(tmp_path_factory.mktemp("page"))
    with running(real(run, "--max-side", "128")) as it:
        it.wait_ready()
        yield it


@needs_browser
def test_it_shows_base_beside_lora_from_the_same_noise(live: Running, tmp_path: Path) -> None:
    text = dom(live, tmp_path, prompt=PROMPT, seed=11, scale=0.5)
    shown = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', text)]
    asked = {"prompt": PROMPT, "seed": 11}
    answer = live.predict({**asked, "lora": "base"}, {**asked, "lora": "first", "lora_scale": 0.5})
    assert shown == [base64.b64decode(data) for data in answer.json()["predictions"]]
    assert "first × 0.5" in element(text, "after") and f'alt="base: {PROMPT}"' in element(text, "before")
    assert 'class="beside"' in element(text, "pictures") and "hidden" in element(text, "cutter").split(">")[0]
    assert re.search(
        r"seed 11, 3 steps, guidance 3, 64 × 64, drawn in [\d.]+ s, waited 0\.\d s", element(text, "about")
    )
    assert re.search(r'<option value="second">', text) and "2 LoRAs and the base" in text


@needs_browser
def test_the_slider_cuts_where_it_is_put(live: Running, tmp_path: Path) -> None:
    text = dom(live, tmp_path, prompt=PROMPT, view="slider", cut=30)
    assert 'class="slider"' in element(text, "pictures") and "--cut: 30%" in element(text, "pictures")
    assert "hidden" not in element(text, "cutter").split(">")[0]


@needs_browser
def test_errors_are_shown_in_words_and_are_no_markup(live: Running, tmp_path: Path) -> None:
    text = dom(live, tmp_path, prompt=PROMPT, width=1000, seed=-1)
    error = element(text, "error")
    assert "hidden" not in error.split(">")[0]
    assert (
        "<li>Width: 1000 does not fit. It must be at most 128.</li>" in error
        and "<li>Seed: -1 does not fit. It must be at least 0.</li>" in error
    )
    assert 'src="data:image/png' not in text


@needs_browser
def test_a_full_queue_is_shown(tmp_path: Path) -> None:
    generator = BlockingGenerator(steps=100_000)
    with running(blocking(generator, Limits(queue=1))) as it:
        it.wait_ready()
        it.service.worker.submit([ImageRequest(PictureRequest("a", 1))])
        until(lambda: len(generator.started) == 1)
        it.service.worker.submit([ImageRequest(PictureRequest("b", 1))])
        text = dom(it, tmp_path, prompt='<img src=x onerror="document.title=1">')
        assert "full with 1 requests" in element(text, "error")


def test_it_needs_nothing_from_elsewhere_and_every_field_has_a_label() -> None:
    page = {file.name: file.read_text() for file in PAGE.iterdir()}
    assert set(page) == {"page.html", "page.css", "page.js"}
    for name, text in page.items():
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text), name
    text = page["page.html"]
    assert not re.search(r"<style|style=|\son\w+=|<script>", text)  # the policy forbids them
    assert "innerHTML" not in page["page.js"]
    for field in re.finditer(r"<(?:input|select|textarea)\b", text):
        before = text[: field.start()]
        assert before.rfind("<label") > before.rfind("</label>"), text[field.start() : field.start() + 60]
    assert 'lang="en"' in text and 'role="alert"' in text and "viewport" in text
