"""The pages where something fails: forms that are none, an app that raises, locks, a runner, the end by a signal."""

from __future__ import annotations

import argparse
import asyncio
import copy
import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from simpletune.apps.http import Guard
from simpletune.apps.web import app, processes, queue, queue_runner
from simpletune.apps.web.access import FAILED, HEADERS, Access
from simpletune.apps.web.form import presets
from simpletune.apps.web.roots import Roots, make_roots
from simpletune.apps.web.templates import MOST_FORM, read_form
from simpletune.commands.init.choices import TRIGGER
from simpletune.commands.init.inspect_folder import inspect_folder
from simpletune.system.locks import UNSUPPORTED
from simpletune.system.options import UserError

FORM = {"content-type": "application/x-www-form-urlencoded; charset=utf-8"}


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return make_roots(tmp_path / "runs", [tmp_path])


def test_a_form_is_read_whole_and_what_is_none_is_refused() -> None:
    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(await read_form(request))

    client = TestClient(Starlette(routes=[Route("/", answer, methods=["POST"])]))
    assert client.post("/", content="a=1&b=&a=%C3%A9+x", headers=FORM).json() == {"a": "é x", "b": ""}
    assert client.post("/", content="a=" + "x" * (MOST_FORM - 2), headers=FORM).status_code == 200
    for content, headers, status, said in (
        ("a=" + "x" * (MOST_FORM - 1), FORM, 413, f"The form is larger than {MOST_FORM} bytes"),
        (b"a=\xff", FORM, 400, "The form is not UTF-8"),
        ("a=%FF", FORM, 400, "The form is not UTF-8"),
        ("&".join(["a=1"] * 5001), FORM, 400, "more than 5,000 fields"),
        ("{}", {"content-type": "application/json"}, 415, "Content-Type is application/json. Send a form"),
        ("a=1", {}, 415, "Content-Type is missing. Send a form"),
    ):
        refused = client.post("/", content=content, headers=headers)
        assert refused.status_code == status and said in refused.text, (status, refused.text)


def test_an_app_that_fails_answers_500_with_the_headers(capsys: pytest.CaptureFixture[str]) -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("what went wrong")

    def guarded(app: Any) -> Guard:
        return Guard(app, None, PlainTextResponse, FAILED, HEADERS, Access(None).refusal)

    client = TestClient(guarded(fails), base_url="http://127.0.0.1")
    answer = client.get("/")
    assert (answer.status_code, answer.text) == (500, FAILED)
    assert HEADERS.items() <= dict(answer.headers).items()
    assert "what went wrong" in capsys.readouterr().err and "what went wrong" not in answer.text

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    scope: Any = {"type": "http", "path": "/late", "method": "GET", "headers": [], "query_string": b""}
    asyncio.run(guarded(fails)(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start"], "a response that has begun gets no other"
    asyncio.run(guarded(PlainTextResponse("x"))({"type": "websocket"}, receive, send))
    assert len(sent) == 1, "what is not HTTP is not answered"


def test_a_folder_takes_the_place_of_a_configuration_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.effect_noise((96, 96), 60).convert("RGB").save(tmp_path / "1.png")
    shipped: Any = {"data": {"path": "old", "prompt": "old", "caption_prefix": "old", "resolution": 32, "flip": True}}
    monkeypatch.setattr(presets, "read_json", lambda file: copy.deepcopy(shipped))
    monkeypatch.setattr(presets, "shipped_files", lambda: {"one": tmp_path})
    for captioned, trigger, expected in (
        (False, "ohwx", {"prompt": "a photo of ohwx"}),
        (False, "", {"prompt": f"a photo of {TRIGGER}"}),
        (True, "ohwx", {"caption_prefix": "ohwx,"}),
        (True, "", {}),
    ):
        if captioned:
            (tmp_path / "1.txt").write_text("a cat")
        made = presets.shipped_config("one", tmp_path, inspect_folder(tmp_path), trigger)
        kept = {"path": str(tmp_path), "resolution": 32, "flip": True, "reading": "any"}
        assert made.data["data"] == kept | expected
        assert {f"data.{key}" for key in expected} <= set(made.reasons)
    assert presets.shipped_config("one", None, None, "").data == shipped


def test_a_log_s_lock_is_tried_again_and_its_absence_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PAUSE", 0)
    tries: list[int] = []

    def answers(*numbers: int) -> Callable[[int, int], None]:
        tries.clear()

        def lock(handle: int, kind: int) -> None:
            tries.append(kind)
            number = numbers[min(len(tries), len(numbers)) - 1]
            if number:
                raise OSError(number, os.strerror(number))

        return lock

    busy = errno.EWOULDBLOCK
    for numbers, shared, expected, count in (
        ((0,), False, True, 1),
        ((busy, busy, 0), False, True, 3),
        ((busy,), False, False, processes.LOOKS),
        ((busy,), True, False, 1),
        *(((number,), False, True, 1) for number in UNSUPPORTED),
    ):
        monkeypatch.setattr(fcntl, "flock", answers(*numbers))
        assert (processes._try_lock(3, shared), len(tries)) == (expected, count), numbers
        assert set(tries) == {(fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB}
    monkeypatch.setattr(fcntl, "flock", answers(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        processes._try_lock(3)


def test_a_runner_that_another_page_has_started_is_no_error(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], str, str]] = []
    looks = [False, True]

    def start(roots: Roots, words: list[str], log_name: str, module: str) -> None:
        started.append((words, log_name, module))
        raise UserError("is still running")

    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(processes, "is_running", lambda roots, name: looks.pop(0))
    queue.ensure_runner(roots)
    assert started == [], "nothing waits"
    monkeypatch.setattr(queue, "is_open", lambda roots: True)
    queue.ensure_runner(roots)
    assert looks == [] and started == [([str(roots.runs), str(roots.named[0])], queue.RUNNER, queue.RUNNER_MODULE)]
    looks[:] = [False, False]
    with pytest.raises(UserError, match="is still running"):
        queue.ensure_runner(roots)


def test_a_run_that_cannot_be_started_has_failed_and_says_why(
    roots: Roots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(queue, "ensure_runner", lambda roots: None)
    one, two = (queue.add(roots, name, roots.named[0] / f"{name}.json", "cpu") for name in ("one", "two"))

    def start(*words: object) -> None:
        raise UserError("no process could be started (no memory). End others, and try again")

    monkeypatch.setattr(processes, "start", start)
    queue_runner.begin(roots, one)
    found = {each.name: (each.state, each.reason) for each in queue.read_queue(roots)}
    assert found["one"] == ("failed", "no process could be started (no memory). End others, and try again")
    assert found["two"] == ("waiting", "")
    queue.remove(roots, two.id)
    queue_runner.begin(roots, two)
    assert [each.name for each in queue.read_queue(roots)] == ["one"], "a removed one is not started"
    assert "start" not in capsys.readouterr().out


@pytest.mark.parametrize("local, token", [(True, False), (True, True), (False, False)])
def test_the_server_says_where_it_is_and_who_may_come(
    local: bool, token: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket and its app are real; only the loop that waits for requests is not entered."""
    ran: list[app.PageServer] = []
    monkeypatch.setattr(app, "is_loopback", lambda bound: local)
    monkeypatch.setattr(app.PageServer, "run", lambda self, sockets: (ran.append(self), sockets[0].close()))
    args = argparse.Namespace(runs=tmp_path / "runs", root=[tmp_path], host="127.0.0.1", port=0, token=token)
    app.run(args)
    said = capsys.readouterr().out
    assert f"runs in {tmp_path / 'runs'}; pictures and configurations below {tmp_path}\n" in said
    assert ("warning: other machines can reach this page" in said) == (not local)
    address = said.rpartition("open ")[2].strip()
    assert address.startswith("http://127.0.0.1:") and ("?token=" in address) == (token or not local)
    secret = address.partition("?token=")[2]
    assert len(secret) in (0, 32)
    client = TestClient(ran[0].config.app, base_url="http://127.0.0.1", follow_redirects=False)
    assert client.get("/").status_code == (401 if secret else 200)
    if secret:
        assert client.get(f"/?token={secret}").status_code == 303
    client.cookies.clear()
    assert client.get("/", headers={"host": "rebound.example"}).status_code == (421 if local else 401)


def test_a_signal_ends_the_streams_of_open_pages_first(capsys: pytest.CaptureFixture[str]) -> None:
    closed: list[bool] = []
    watch: Any = SimpleNamespace(close=lambda: closed.append(True))
    stopped = app.PageServer(PlainTextResponse("x"), watch)
    stopped.handle_exit(signal.SIGTERM, None)
    assert closed == [True] and stopped.should_exit
    assert capsys.readouterr().out == "SIGTERM: the page stops; runs and the queue continue\n"
