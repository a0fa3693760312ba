"""What protects a server holds for ``web`` and for ``serve``."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from serving import BlockingGenerator, blocking, running, until
from starlette.exceptions import HTTPException
from starlette.requests import Request
from web_pages import address_of, pages_served

from simpletune.apps import http

PATHS = {"web": "/start/change", "serve": "/predict"}  # that read a body
KINDS = {"web": "application/x-www-form-urlencoded", "serve": "application/json"}


@pytest.fixture(params=["web", "serve"])
def app(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def server(app: str, tmp_path: Path) -> Iterator[http.HttpServer]:
    """A server that runs."""
    if app == "web":
        with pages_served(tmp_path) as found:
            yield found
        return
    with running(blocking(BlockingGenerator(blocked=False))) as it:
        it.wait_ready()
        yield it.service.server


@pytest.fixture
def address(server: http.HttpServer) -> tuple[str, int]:
    return address_of(server)


def get(address: tuple[str, int], **headers: str) -> httpx.Response:
    """The answer to a request on a connection of its own."""
    with httpx.Client(timeout=60, verify=False) as client:  # certificates take longer to read than the answer
        return client.get(f"http://{address[0]}:{address[1]}/", headers=headers)


def begun(app: str, address: tuple[str, int], *headers: str) -> bytes:
    """The head of a request that changes something."""
    host = f"{address[0]}:{address[1]}"
    lines = (f"POST {PATHS[app]} HTTP/1.1", f"Host: {host}", f"Origin: http://{host}", f"Content-Type: {KINDS[app]}")
    return "\r\n".join([*lines, *headers, "", ""]).encode()


def read_all(connection: socket.socket) -> bytes:
    """What arrives until the server closes; otherwise the socket's time-out fails the test."""
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "], ids=["nothing", "half"])
@pytest.mark.parametrize("answered", [False, True], ids=["at once", "after an answer"])
def test_a_connection_on_which_no_headers_arrive_is_closed(
    sent: bytes, answered: bool, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    get = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    monkeypatch.setattr(http, "HEADER_TIMEOUT", 600 if answered else 0.3)
    with socket.create_connection(address, timeout=60) as connection:
        if answered:
            connection.sendall(get)
            assert connection.recv(12) == b"HTTP/1.1 200"
            monkeypatch.setattr(http, "HEADER_TIMEOUT", 0.3)  # from the next answer on
            connection.sendall(get)
        with suppress(ConnectionError):  # it may be closed before all is sent
            connection.sendall(sent)
            read_all(connection)


def test_a_body_that_is_too_large_is_not_read(app: str, address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(begun(app, address, "Content-Length: 99999999"))
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 413") and b"is larger than" in answer
    with socket.create_connection(address, timeout=60) as connection:  # of unknown length
        connection.sendall(begun(app, address, "Transfer-Encoding: chunked"))
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")


@pytest.mark.parametrize("target", ["/%00", "/" + "x" * 5000, "/%ed%a0%80", "/..%2f..", "/predict?x=" + "9" * 5000])
def test_an_odd_address_is_answered(app: str, address: tuple[str, int], target: str) -> None:
    with httpx.Client(timeout=60, verify=False) as client:
        assert client.get(f"http://{address[0]}:{address[1]}{target}").status_code in (404, 405)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0), ("007", 7), (str(2**63 - 1), 2**63 - 1), (str(2**63), None), ("9" * 5000, None), ("-1", None),
        ("", None), (" 1", None), ("1.0", None), ("\u0663", None), ("\u00b2", None), ("nan", None), ("1_0", None),
    ],
)  # fmt: skip
def test_a_number_of_a_request_is_whole_and_of_64_bits(text: str, number: int | None) -> None:
    assert http.whole_number(text) == number


def test_a_length_of_thousands_of_digits_is_too_large() -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"9" * 5000)]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers})
    with pytest.raises(HTTPException) as caught:
        asyncio.run(http.read_body(request, "application/json", 100, "body", "application/json"))
    assert caught.value.status_code == 413


def test_a_client_that_is_refused_early_may_send_its_body_first(
    app: str, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEADER_TIMEOUT", 0.1)
    host = f"{address[0]}:{address[1]}"
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(f"POST /nowhere HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n".encode())
        connection.sendall(b"Content-Length: 100\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 404"
        time.sleep(0.3)  # with less patience the connection would be closed now
        connection.sendall(b"x" * 100 + f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert b"HTTP/1.1 200" in read_all(connection)


def test_a_body_that_does_not_arrive_is_not_waited_for_and_a_client_that_leaves_is_no_error(
    app: str,
    server: http.HttpServer,
    address: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    handled = server.server_state.tasks
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(begun(app, address, "Content-Length: 100") + b"a=1")
        until(lambda: bool(handled))
    until(lambda: not handled)
    assert "Traceback" not in capfd.readouterr().err
    monkeypatch.setattr(http, "BODY_TIMEOUT", 0.3)
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(begun(app, address, "Content-Length: 100") + b"a=1")
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.3 s" in answer


def test_a_host_that_only_begins_with_its_name_is_not_its_own(address: tuple[str, int]) -> None:
    name, port = address
    wrong = f"127.0.0.1:{port}@evil", "evil@127.0.0.1", "127.0.0.1:x", "127.0.0.1:", "127.0.0.1/evil", "127.0.0.1 evil"
    for given, status in (*((host, 421) for host in wrong), (f"{name}:{port}", 200)):
        answer = get(address, Host=given)
        assert answer.status_code == status, given
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_no_more_connections_than_may(app: str, address: tuple[str, int]) -> None:
    """Neither is without a limit; the one of ``serve`` follows from its queue."""
    most = {"web": 256, "serve": 4 * 32 + 64}[app]
    held = [socket.create_connection(address, timeout=60) for _ in range(most)]
    try:
        until(lambda: get(address).status_code == 503)
    finally:
        for connection in held:
            connection.close()
    until(lambda: get(address).status_code == 200)
