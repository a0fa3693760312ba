"""All runs: pictures, what differs, figures, the queue's buttons; cheap for many runs."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from PIL import Image
from web_pages import open_pages

from simpletune.apps.web import queue, run_state, runs_page
from simpletune.apps.web.queue import QueueEntry
from simpletune.apps.web.roots import make_roots
from simpletune.apps.web.run_state import newest_image
from simpletune.apps.web.runs_page import differences, flatten


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "ensure_runner", lambda roots: None)


def make_run(folder: Path, image: bool = True, **settings: object) -> Path:
    folder.mkdir(parents=True)
    data = {"name": folder.name, "train": {"steps": 10}, "adapter": {"rank": 8}, **settings}
    (folder / "config.json").write_text(json.dumps(data))
    (folder / "metrics.jsonl").write_text('{"step": 10, "loss": 0.25}\n')
    summary = {"steps": 10, "peak_allocated_gib": 3.5, "eval_loss_after": 0.125}
    (folder / "summary.json").write_text(json.dumps(summary))
    started = {"started": "2026-11-22T10:00:00Z", "device": "cpu", "from_step": 0, "last_step": 10, "seconds": 7200}
    (folder / "attempts.json").write_text(json.dumps([{**started, "ended": "finished"}]))
    if image:
        (folder / "samples").mkdir()
        Image.new("RGB", (900, 300), "teal").save(folder / "samples" / "step-10.png")
    return folder


def test_the_table_shows_pictures_figures_and_what_differs(tmp_path: Path) -> None:
    for name in ("a", "b", "c&<i>"):
        make_run(tmp_path / "runs" / name)
    make_run(tmp_path / "runs" / "other", adapter={"rank": 64}, optimizer={"lr": 0.00005})
    client = open_pages(tmp_path)
    text = client.get("/").text
    assert "c&amp;&lt;i&gt;" in text and "<i>" not in text
    assert "adapter.rank 64" in text and "optimizer.lr 5e-05" in text and "adapter.rank 8" not in text
    assert text.count("3.50 GiB") == 4 and text.count("2 h 0 min") == 4 and text.count("0.1250") == 4
    address = text.partition('src="/runs/thumbnail/')[2].partition('"')[0]
    answer = client.get(f"/runs/thumbnail/{address}")
    assert answer.headers["content-type"] == "image/jpeg" and "max-age" in answer.headers["cache-control"]
    (small,) = (tmp_path / "runs" / ".web" / "thumbnails").glob("*.jpg")
    with Image.open(small) as image:
        assert image.size == (512, 171)
    changed = small.stat().st_mtime_ns
    client.get(f"/runs/thumbnail/{address}")
    assert small.stat().st_mtime_ns == changed  # made once


def test_a_damaged_picture_or_one_outside_is_not_sent(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a")
    client = open_pages(tmp_path)
    (run / "samples" / "step-10.png").write_bytes(b"no picture")
    assert client.get("/runs/thumbnail/a").status_code == 404
    (run / "samples" / "step-10.png").unlink()
    Image.new("RGB", (9, 9)).save(tmp_path / "secret.png")
    (run / "samples" / "step-10.png").symlink_to(tmp_path / "secret.png")
    assert client.get("/runs/thumbnail/a").status_code == 404
    for name in ("none", "..", ".web", "%2e%2e"):
        assert client.get(f"/runs/thumbnail/{name}").status_code == 404


def test_what_differs_is_counted_against_most_runs() -> None:
    settings = [{"a": "1", "b": "x"}, {"a": "1"}, {"a": "2"}, {}]
    assert differences(settings) == [["b x"], [], ["a 2"], []]
    many = [{}, {"k": "1"}, *({f"k{n}": "1"} for n in range(2)), {f"x{n}": "1" for n in range(9)}]
    assert differences(many)[4][-1] == "and 3 more" and len(differences(many)[4]) == 7
    assert flatten({"a": {"b": [1, 2]}, "c": "x" * 99}) == {"a.b": "[1, 2]", "c": "x" * 37 + "..."}


def test_two_hundred_runs_are_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(200):
        make_run(tmp_path / "runs" / f"run{number}", image=False, seed=number)
    roots = make_roots(tmp_path / "runs", [tmp_path])
    assert len(runs_page.rows(roots)) == 200
    reads = []
    monkeypatch.setattr(runs_page, "state_of", lambda folder: reads.append(folder) or run_state.state_of(folder))
    with (tmp_path / "runs" / "run7" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 0.5}\n')
    begun = time.process_time()
    shown = runs_page.rows(roots)
    print(f"{time.process_time() - begun:.3f} s of processor time for the table of 200 runs, one changed")
    assert [folder.name for folder in reads] == ["run7"]  # the others are read when they change
    assert any(row["state"].done == 11 for row in shown)  # type: ignore[attr-defined]


def test_the_queue_has_its_buttons(tmp_path: Path) -> None:
    roots = make_roots(tmp_path / "runs", [tmp_path])
    entries = [
        QueueEntry(id="1", name="one", config="c", device="cpu", state="running"),
        QueueEntry(id="2", name="two", config="c", device="cpu", state="failed", reason="no <b>pictures</b>"),
        QueueEntry(id="3", name="three", config="c", device="cpu"),
        QueueEntry(id="4", name="four", config="c", device="cpu"),
    ]
    queue.change(roots, lambda old: entries)
    client = open_pages(tmp_path)
    text = client.get("/runs/queue").text
    buttons = {"Stop one": 1, "Remove one": 0, "Up two": 0, "Remove two": 1, "Up three": 1}
    assert {words: text.count(f'aria-label="{words}"') for words in buttons} == buttons
    assert "no &lt;b&gt;pictures" in text
    answer = client.post("/queue/up", data={"id": "4"}, headers={"hx-request": "true"})
    assert answer.text.index("four") < answer.text.index("three")
    assert client.post("/queue/remove", data={"id": "2"}).headers["location"] == "/"
    assert [each.name for each in queue.read_queue(roots)] == ["one", "four", "three"]
    assert client.post("/queue/nothing", data={"id": "2"}).status_code == 404
    assert client.post("/queue/nothing").status_code == 404  # asked before the form, which would be 415
    assert client.post("/queue/remove").status_code == 415
    again = client.get("/queue/remove")  # a page that says why it failed is opened again
    assert (again.status_code, again.headers["location"]) == (303, "/")
    assert client.get("/queue/nothing").status_code == 404
    assert client.post("/queue/remove", data={"id": "4"}, headers={"origin": "http://evil.example"}).status_code == 403
    (roots.own / "queue.json").write_text('[{"id": "9", "name": "<i>newer", "mood": 1}]')
    shown = client.get("/").text
    assert "&lt;i&gt;newer" in shown and "this version cannot start it" in shown and "config, device, mood" in shown
    assert "newer" not in client.post("/queue/remove", data={"id": "9"}, headers={"hx-request": "true"}).text
    (roots.own / "queue.json").write_text("{")
    assert "is damaged" in client.get("/").text


def test_a_queued_run_leads_to_its_page_once_it_has_begun(tmp_path: Path) -> None:
    roots = make_roots(tmp_path / "runs", [tmp_path])
    entry = QueueEntry(id="1", name="one", config="c", device="cpu", state="failed", reason="no pictures")
    queue.change(roots, lambda old: [entry])
    client = open_pages(tmp_path)
    text = client.get("/queued/1").text
    assert "no pictures" in text and "/start?file=c" in text
    assert client.get("/queued/2").status_code == 404
    make_run(tmp_path / "runs" / "one")
    queue.change(roots, lambda old: [entry.model_copy(update={"state": "finished"})])
    assert client.get("/queued/1").headers["location"] == "/run/one"
    assert client.get("/queued/1/part").headers["hx-redirect"] == "/run/one"


def test_the_picture_of_a_run_is_the_first_of_its_newest_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", image=False)
    for place, colour in (("base", "red"), ("step-000010", "blue"), ("step-000100", "lime")):
        for number in range(2):
            (run / "samples" / place).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), colour).save(run / "samples" / place / f"prompt-0{number}.png")
    assert newest_image(run / "samples") == run / "samples/step-000100/prompt-00.png"
    shutil.rmtree(run / "samples/step-000100")
    shutil.rmtree(run / "samples/step-000010")
    assert newest_image(run / "samples") == run / "samples/base/prompt-00.png"


def test_losses_of_the_chosen_runs_are_one_chart(tmp_path: Path) -> None:
    for name in "abcdefgh":
        run = make_run(tmp_path / "runs" / name)
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')
    client = open_pages(tmp_path)
    page = client.get("/").text
    assert page.count("<polyline") == 4 and page.count(" checked") == 4
    chart = client.get("/runs/losses?run=b&run=h&run=none&run=../a").text
    assert chart.count("<polyline") == 2 and 'data-name="b"' in chart and 'data-name="h"' in chart
    cards = client.get("/runs/table?run=b").text
    assert cards.count(" checked") == 1 and "<polyline" not in client.get("/runs/losses").text
    everything = "&".join(f"run={name}" for name in "abcdefgh")
    assert client.get(f"/runs/losses?{everything}").text.count("<polyline") == 6
