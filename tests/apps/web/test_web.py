"""``simpletune web``: who may ask, which files may be touched, how open pages learn of changes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Hashable
from pathlib import Path

import pytest
from web_pages import ADDRESS, open_pages

from simpletune.apps.web import events
from simpletune.apps.web.app import STATIC
from simpletune.apps.web.events import FileWatcher
from simpletune.apps.web.roots import make_roots
from simpletune.apps.web.run_state import last_row, state_of
from simpletune.system.options import UserError


def make_run(folder: Path, **row: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"name": folder.name, "train": {"steps": 10}}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 0.5, **row}) + "\n")
    return folder


def test_only_its_own_pages_change_anything(tmp_path: Path) -> None:
    client = open_pages(tmp_path)
    assert client.get("/").status_code == 200
    assert client.get("/", headers={"host": "rebound.example:8100"}).status_code == 421
    other_port = ADDRESS.replace("8100", "8101")
    for origin in ("http://evil.example", "null", other_port, "http://127.0.0.1:8100.evil.example"):
        refused = client.post("/", headers={"origin": origin})
        assert refused.status_code == 403 and "another site" in refused.text
    del client.headers["origin"]
    assert client.post("/").status_code == 403
    assert client.post("/", headers={"origin": ADDRESS}).status_code == 405  # it passes: there is no such form


def test_a_token_becomes_a_cookie(tmp_path: Path) -> None:
    client = open_pages(tmp_path, token="secret")
    assert client.get("/").status_code == 401
    assert client.get("/static/app.js").status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    assert client.post("/?token=secret").status_code == 401  # a form elsewhere cannot log in
    welcome = client.get("/?token=secret&a=b%26c")
    assert (welcome.status_code, welcome.headers["location"]) == (303, "/?a=b%26c")
    cookie = welcome.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert client.get("/").status_code == 200
    client.cookies.clear()
    assert client.get(f"{ADDRESS}//evil.example/?token=secret").headers["location"] == "/evil.example/"
    assert client.get("/", headers=[(b"cookie", b"simpletune=\xff; =")]).status_code == 401


def test_every_response_has_the_headers_and_no_page_an_inline_style(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "<b>&")
    client = open_pages(tmp_path)
    for path, status in (("/", 200), ("/nothing", 404), ("/static/app.js", 200), ("/static/../app.py", 404)):
        answer = client.get(path)
        assert answer.status_code == status
        assert "script-src 'self'" in answer.headers["content-security-policy"]
    text = client.get("/").text
    assert "&lt;b&gt;&amp;" in text and "<b>" not in text
    assert " style=" not in text and "<script>" not in text and " onclick" not in text
    assert client.get("/nothing", headers={"hx-request": "true"}).text.startswith('<p class="problem"')
    assert all((folder / name).is_file() for name, folder in STATIC.items())


def test_no_path_outside_of_the_roots(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret.txt").write_text("x")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    roots = make_roots(tmp_path / "in" / "runs", [tmp_path / "in"])
    assert roots.resolve("pictures") == tmp_path / "in" / "pictures"
    for text in ("../out", "link", "link/secret.txt", str(tmp_path / "out"), "/etc/passwd", "~", "a\0b"):
        with pytest.raises(UserError, match="outside|not a path"):
            roots.resolve(text)
    run = make_run(tmp_path / "in" / "runs" / "one")
    (run / "leak").symlink_to(tmp_path / "out" / "secret.txt")
    assert roots.run("one") == run
    assert [roots.run(name) for name in ("", ".", "..", "../runs", ".web", "none", "one/../one", "\0")] == [None] * 8
    assert roots.find_inside(run, "config.json") == run / "config.json"
    for name in ("leak", "../../link/secret.txt", "nothing", "/etc/passwd"):
        assert roots.find_inside(run, name) is None
    (tmp_path / "in" / "runs" / "elsewhere").symlink_to(make_run(tmp_path / "out" / "run"))
    assert [folder.name for folder in roots.all_runs()] == ["one"]


def test_the_state_of_a_run_is_read_from_the_ends_of_its_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    state = state_of(run)
    assert (state.word, state.done, state.steps, state.loss) == ("new", 3, 10, 0.5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("x" * 9000 + "\n" + '{"step": 4, "loss": 0.25}\n{"step": 5, "lo')
    assert last_row(run / "metrics.jsonl") == {"step": 4, "loss": 0.25}
    (run / "config.json").write_text("{")
    (run / "attempts.json").write_text("[]]")
    assert state_of(run).settings == {} and state_of(run).done == 4
    assert last_row(run / "nothing") == {}


def test_pages_learn_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PERIOD", 0.01)
    stamps: dict[str, Hashable] = {"runs": 1, "run:a": 1}

    async def scenario() -> None:
        watch = FileWatcher(lambda: dict(stamps))
        streams = [watch.stream() for _ in range(20)]
        assert [await anext(each) for each in streams] == [b"retry: 2000\nevent: hello\ndata: []\n\n"] * 20
        number, _ = await watch.since(-1)
        stamps.update({"run:a": 2, "run:b": 1})
        assert [await anext(each) for each in streams] == [b'event: changed\ndata: ["run:a", "run:b"]\n\n'] * 20
        assert await watch.since(number) == (number + 1, ["run:a", "run:b"])
        assert (await watch.since(number + 1))[1] == []
        assert (await watch.since(number + 99))[1] == ["run:a", "run:b", "runs"]  # of a server started since
        watch.close()
        for each in streams:
            assert await anext(each) == b"event: bye\ndata: []\n\n"
            with pytest.raises(StopAsyncIteration):
                await anext(each)
        assert watch._task is not None
        await watch._task  # ends: nobody listens, nobody looks

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_an_idle_stream_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT", 0.01)

    async def scenario() -> None:
        watch = FileWatcher(dict)
        stream = watch.stream()
        assert (await anext(stream)).startswith(b"retry: 2000\nevent: hello\n")
        assert [await anext(stream) for _ in range(2)] == [b"event: beat\ndata: []\n\n"] * 2
        watch.close()
        await stream.aclose()
        assert watch._task is not None
        await watch._task

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_change_of_a_run_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one")
    client = open_pages(tmp_path)
    number = client.get("/changes").json()["number"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0.125}\n')
    os.utime(run / "metrics.jsonl", ns=(1, 1))
    client.app.app.state.watch._looked = float("-inf")  # type: ignore[attr-defined]
    assert client.get(f"/changes?since={number}").json()["topics"] == ["run:one", "runs"]
    assert "0.1250" in client.get("/runs/table").text
