"""Pages over damaged files of runs, and odd addresses: an answer for every one, and the other runs as they are."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from pathlib import Path

import pytest
from recorded_runs import write_run
from web_pages import many_pages, open_pages

from simpletune.apps.web import live, queue

CONTENTS = [
    b"", b"[[[", b"\xff", b"1", b'"x"', b"null", b"[]", b"{}", b'{"step": 1e400}', b'{"step": "x", "loss": []}',
    b'{"train": "x", "data": [], "model": 3}', b'{"train": {"steps": "x"}}', b"[" * 100_000, b'{"steps": -1e308}',
    b'{"steps": 3, "best": 7, "stages": [], "eval_loss_after": "x", "peak_allocated_gib": {}}', b"[1]",
    b'[{"started": 5}]',
]  # fmt: skip
FILES = (
    "config.json", "summary.json", "metrics.jsonl", "evaluations.jsonl", "eval_before.json", "attempts.json",
    "environment.json", "best.json", "data.json", "planned.json", "predicted.json", "chosen.json", "skipped.jsonl",
    "overflows.jsonl", "control.json", "control_answers.jsonl", "evaluation.json", "drawn/drawn.jsonl",
)  # fmt: skip
PAGES = ("/", "/run/odd")  # of the damaged run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A root with two runs, of which one is damaged."""
    for name in ("odd", "whole"):
        write_run(tmp_path / "runs" / name)
    return tmp_path


def test_a_damaged_run_takes_no_page_down(folder: Path) -> None:
    run = folder / "runs" / "odd"

    async def damage() -> None:
        async with many_pages(folder) as pages:
            whole = (await pages.get("/run/whole")).text
            for name in FILES:
                file = run / name
                before = file.read_bytes() if file.exists() else None
                file.parent.mkdir(exist_ok=True)
                for content in CONTENTS:
                    file.write_bytes(content)
                    for page in PAGES:
                        assert (await pages.get(page)).status_code == 200, (name, content[:40], page)
                assert "odd" in (await pages.get("/runs/table")).text and (await pages.get("/run/whole")).text == whole
                file.unlink() if before is None else file.write_bytes(before)

    asyncio.run(damage())


def test_a_folder_in_place_of_a_file(folder: Path) -> None:
    run = folder / "runs" / "odd"

    async def replace() -> None:
        async with many_pages(folder) as pages:
            for name in FILES:
                place, aside = run / name, run / "aside"
                if place.exists():
                    place.rename(aside)
                place.mkdir(parents=True)
                for page in PAGES:
                    assert (await pages.get(page)).status_code == 200, (name, page)
                shutil.rmtree(place)
                if aside.exists():
                    aside.rename(place)

    asyncio.run(replace())


def test_a_damaged_run_is_a_row_that_says_so(folder: Path) -> None:
    pages = open_pages(folder)
    for content in (b"[[[", b"1", b"\xff"):
        (folder / "runs" / "odd" / "summary.json").write_bytes(content)
        assert "summary.json cannot be read" in pages.get("/").text


ODD = ["a" * 300, "1" * 5000, "\ud800", "..", "%00", "x\ny"]
GETS = (
    "/run/{}", "/run/{}/charts", "/run/whole/file/{}", "/run/whole/small/{}", "/runs/thumbnail/{}", "/queued/{}",
    "/start?from={}", "/start?file={}", "/start/live?key={}", "/data?place=.&page={}",
)  # fmt: skip
POSTS = (
    *itertools.product(("/start/change", "/start/run", "/start/config.json"), ("state", "name")), ("/queue/up", "id"),
    ("/run/whole/ask", "ask"), ("/run/whole/compare", "step"), ("/data/caption", "name"),
)  # fmt: skip


def test_odd_addresses_and_forms_get_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.Estimator, "want", lambda *_: None)
    monkeypatch.setattr(queue, "ensure_runner", lambda _: None)
    form = {"content-type": "application/x-www-form-urlencoded"}

    async def ask() -> None:
        async with many_pages(folder) as pages:
            for text in ODD:
                quoted = "".join(f"%{byte:02x}" for byte in text.encode("utf-8", "surrogatepass"))
                for path in GETS:
                    assert (await pages.get(path.format(quoted))).status_code < 500, (path, text[:9])
                for path, field in POSTS:
                    body = f"{field}={quoted}" if field != "state" else f"state={json.dumps(dict(a=text))}"
                    sent = body.encode("utf-8", "surrogatepass")
                    answer = await pages.post(path, content=sent, headers=form)
                    assert answer.status_code < 500, (path, field, text[:9])

    asyncio.run(ask())
