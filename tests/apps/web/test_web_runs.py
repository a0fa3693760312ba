"""All runs: pictures, what differs, figures, the queue's buttons; cheap for many runs."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from PIL import Image
from web_pages import open_pages

from simpletune.apps.web import queue, run_bin, run_state, runs_page
from simpletune.apps.web.marks import Marks, read_marks
from simpletune.apps.web.queue import QueueEntry
from simpletune.apps.web.roots import make_roots
from simpletune.apps.web.run_state import newest_image
from simpletune.apps.web.runs_page import differences, flatten
from simpletune.runs.folder import newest_run
from simpletune.system.locks import exclusive
from simpletune.system.options import UserError

SURE = {"sure": "yes"}  # an empty form, which the client would send as none


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
    assert text.count("3.50 GiB") == 4 and text.count("2 h 0 min") == 4 and text.count("evaluation loss 0.1250") == 4
    address = text.partition('src="/runs/thumbnail/')[2].partition('"')[0]
    answer = client.get(f"/runs/thumbnail/{address}")
    assert answer.headers["content-type"] == "image/webp" and "max-age" in answer.headers["cache-control"]
    (small,) = (tmp_path / "runs" / ".web" / "thumbnails").glob("*.webp")
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
    assert len(runs_page.rows(roots, Marks())) == 200
    reads = []
    monkeypatch.setattr(runs_page, "state_of", lambda folder: reads.append(folder) or run_state.state_of(folder))
    with (tmp_path / "runs" / "run7" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 0.5}\n')
    begun = time.process_time()
    shown = runs_page.rows(roots, Marks())
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


def test_a_run_that_ended_as_planned_leaves_the_queue(tmp_path: Path) -> None:
    roots = make_roots(tmp_path / "runs", [tmp_path])
    states: tuple[queue.State, ...] = ("finished", "stopped", "failed", "killed")
    entries = [QueueEntry(id=state, name=state, config="c", device="cpu", state=state) for state in states]
    make_run(tmp_path / "runs" / "finished")
    queue.change(roots, lambda old: entries)
    client = open_pages(tmp_path)
    shown = [state for state in states if f'id="remove-{state}"' in client.get("/runs/queue").text]
    assert shown == ["stopped", "failed", "killed"]  # the stopped one had not begun
    make_run(tmp_path / "runs" / "stopped")
    assert 'id="remove-stopped"' not in client.get("/runs/queue").text
    assert client.get("/queued/finished").headers["location"] == "/run/finished"


def test_a_card_says_which_loss_the_best_step_has(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a")
    row = {"step": 5, "eval_loss": 0.0871, "eval_losses": [0.08, 0.0942], "held_out": True}
    (run / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    for best, said in (
        ({"step": 5, "by": "held-out loss"}, "best step 5 by held-out loss (held-out loss 0.0871)"),
        ({"step": 10, "by": "last"}, "last step 10<"),
    ):
        (run / "summary.json").write_text(json.dumps({"steps": 10, "best": best, "eval_loss_after": 0.125}))
        text = open_pages(tmp_path).get("/").text
        assert said in text and "0.1250" not in text and "0.2500" not in text


def test_stars_and_hidden_runs_are_marked_beside_the_runs(tmp_path: Path) -> None:
    for name in ("a", "b", "c<i>"):
        make_run(tmp_path / "runs" / name)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").glob("[abc]*/**/*")}
    client, roots = open_pages(tmp_path), make_roots(tmp_path / "runs", [tmp_path])
    htmx = {"hx-request": "true"}
    starred = client.post("/run/a/mark", data={"what": "star"}, headers=htmx)
    assert starred.status_code == 204 and starred.headers["hx-trigger"] == "renew"
    assert client.post("/run/c<i>/mark", data={"what": "hide"}).headers["location"] == "/"  # without scripts
    assert client.post("/run/a/mark", data={"what": "eat"}).status_code == 422
    page = client.get("/").text
    places = [
        page.index(each) for each in ('aria-label="Star a"', 'aria-label="Star b"', "Show 1 hidden", "c&lt;i&gt;")
    ]
    assert places == sorted(places)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    (tmp_path / "runs" / "a").rename(tmp_path / "runs" / "a.1")  # as a new run of its name does
    started = (make_run(tmp_path / "runs" / "a") / "attempts.json").read_text()
    (tmp_path / "runs" / "a" / "attempts.json").write_text(started.replace("T10:", "T11:"))
    stars = {row["state"].name: row["starred"] for row in runs_page.rows(roots, read_marks(roots))}
    assert stars == {"a": False, "a.1": True, "b": False, "c<i>": False}
    client.post("/run/a.1/mark", data={"what": "unstar"})
    client.post("/run/c<i>/mark", data={"what": "unhide"})
    assert read_marks(roots) == Marks()
    (roots.own / "marks.json").write_text("[")
    assert "marks.json is damaged" in client.get("/").text
    client.post("/run/b/mark", data={"what": "star"})
    assert len(read_marks(roots).starred) == 1 and (roots.own / "marks.json.damaged").is_file()


def test_a_deleted_run_lies_in_the_bin_until_it_is_emptied(tmp_path: Path) -> None:
    runs, client = tmp_path / "runs", open_pages(tmp_path)
    run, roots = make_run(runs / "a"), make_roots(tmp_path / "runs", [tmp_path])
    (run / "weights").write_bytes(bytes(3 * 2**20))
    asked = client.get("/run/a/delete").text
    assert "Delete a?" in asked and "3.0 MiB move to the bin" in asked and run.is_dir()
    said = client.post("/run/a/delete", headers={"hx-request": "true"}, data=SURE).text
    assert "a is in the bin" in said and not run.exists() and list(roots.all_runs()) == []
    assert client.get("/run/a").status_code == 404
    with pytest.raises(UserError, match="contains no finished run"):  # nor do the verbs see it
        newest_run(runs)
    assert "Bin: 1 run, 3.0 MiB" in client.get("/runs/bin").text
    make_run(run)
    binned = run_bin.read_bin(roots)
    client.post("/runs/bin/restore", data={"id": binned[0].id})
    assert (runs / "a.1" / "weights").is_file() and run_bin.read_bin(roots) == [] and (run / "config.json").is_file()
    assert list((runs / ".bin").iterdir()) == []
    assert client.post("/runs/bin/restore", data={"id": binned[0].id}).status_code == 422
    client.post("/run/a/delete", data=SURE)
    asked = client.get("/runs/bin/empty").text
    client.post("/run/a.1/delete", data=SURE)  # by another page, after the question
    (ids,) = re.findall(r'name="ids" value="([^"]+)"', asked)
    client.post("/runs/bin/empty", data={"ids": ids})
    assert [each.name for each in run_bin.read_bin(roots)] == ["a.1"]
    client.post("/runs/bin/empty", data={"ids": "../../runs"})
    assert [each.name for each in run_bin.read_bin(roots)] == ["a.1"]


def test_a_run_that_something_works_on_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, client = make_run(tmp_path / "runs" / "a"), open_pages(tmp_path)
    roots = make_roots(tmp_path / "runs", [tmp_path])
    with exclusive(run):
        assert "in use by another run" in client.post("/run/a/delete", data=SURE).text
    entry = QueueEntry(id="1", name="a", config="c", device="cpu", resume=True)
    queue.change(roots, lambda old: [entry])
    assert "a is in the queue" in client.post("/run/a/delete", data=SURE).text
    queue.change(roots, lambda old: [])
    with monkeypatch.context() as patch:
        patch.setattr(runs_page.processes, "is_running", lambda roots, name: name == "compare-a")
        assert "Comparison of a is still running" in client.post("/run/a/delete", data=SURE).text
    assert run.is_dir() and run_bin.read_bin(roots) == []
    assert client.post("/run/a/delete", data=SURE).status_code == 303


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
