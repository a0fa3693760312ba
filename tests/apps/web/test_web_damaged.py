"""Pages over damaged files of runs, and odd addresses: an answer for every one, and the other runs as they are."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
from recorded_runs import write_run
from starlette.testclient import TestClient
from web_pages import open_pages

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
PAGES = ("/", "/runs/table", "/run/odd", "/run/whole")


@pytest.fixture
def pages(tmp_path: Path) -> TestClient:
    for name in ("odd", "whole"):
        write_run(tmp_path / "runs" / name)
    return open_pages(tmp_path)


def answers(pages: TestClient) -> dict[str, int]:
    return {page: pages.get(page).status_code for page in PAGES}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_run_takes_no_page_down(name: str, pages: TestClient, tmp_path: Path) -> None:
    run, failed = tmp_path / "runs" / "odd", {}
    whole = pages.get("/run/whole").text
    for content in CONTENTS:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(content)
        failed |= {(content[:40], page): code for page, code in answers(pages).items() if code != 200}
    assert not failed
    assert "odd" in pages.get("/").text and pages.get("/run/whole").text == whole


def test_a_folder_in_place_of_a_file(pages: TestClient, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "odd"
    for name in FILES:
        place, aside = run / name, run / "aside"
        if place.exists():
            place.rename(aside)
        place.mkdir(parents=True)
        assert set(answers(pages).values()) == {200}, name
        shutil.rmtree(place)
        if aside.exists():
            aside.rename(place)


def test_a_damaged_run_is_a_row_that_says_so(pages: TestClient, tmp_path: Path) -> None:
    for content in (b"[[[", b"1", b"\xff"):
        (tmp_path / "runs" / "odd" / "summary.json").write_bytes(content)
        assert "summary.json cannot be read" in pages.get("/").text


ODD = ["a" * 300, "1" * 5000, "\ud800", "..", "%00", "x\ny"]


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_odd_addresses_and_forms_get_an_answer(text: str, pages: TestClient) -> None:
    quoted = "".join(f"%{byte:02x}" for byte in text.encode("utf-8", "surrogatepass"))
    paths = ("/run/{}", "/runs/thumbnail/{}", "/changes?since={}&runs=1", "/start?source={}", "/start/live?key={}",
             "/run/whole/picture/{}", "/data?path={}", "/run/{}/charts", "/run/whole/series?source={}")  # fmt: skip
    codes = {path: pages.get(path.format(quoted)).status_code for path in paths if not path.startswith("/changes")}
    form = {"content-type": "application/x-www-form-urlencoded"}
    posts = ("/start/change", "/start/run", "/start/config.json", "/queue/up", "/run/whole/control", "/data/caption")
    for path, field in itertools.product(posts, ("state", "id", "key", "name")):
        body = f"{field}={quoted}" if field != "state" else f"state={json.dumps(dict(a=text))}"
        codes[f"POST {path} {field}"] = pages.post(
            path, content=body.encode("utf-8", "surrogatepass"), headers=form
        ).status_code
    assert not {path: code for path, code in codes.items() if code >= 500}
