"""One way to serve HTTP, for ``web`` and ``serve``: the socket, uvicorn's settings, time-outs and limits, the checks of
every request and the headers of every response. The apps have their routes and the form of their answers."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import time
import traceback
from collections.abc import Callable, Collection, Mapping

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from simpletune.system.options import UserError

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
HEADER_TIMEOUT = 10.0  # seconds for a request's headers to arrive, from the connection or the last response
BODY_TIMEOUT = 30.0  # seconds for a body to arrive
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a closed connection; no client sees it
CLIENT_LEFT = "The client closed the connection"
UNKNOWN_HOST = "Unknown Host header. Use the address that the server printed"
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\s:@/\[\]]+)(:[0-9]{1,5})?")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

# The address


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises UserError if the address does not exist or is in use."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise UserError(
            f"--port: cannot listen on {host}:{port} ({error.strerror or error}). Use another port"
        ) from None
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a response's second part waits 40 ms for an ACK
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def is_loopback(bound: socket.socket) -> bool:
    """Return whether only this machine can reach a listening socket."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def loopback_hosts(host: str) -> set[str]:
    """Return the Host headers that a server on loopback accepts."""
    return {"localhost", LOOPBACK, "[::1]", host, f"[{host}]"}


# The server


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which closes connections whose headers do not arrive in time; otherwise each would occupy a
    slot forever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # a client that was refused early may still send its body, and reads the answer after that
        self._await_headers(HEADER_TIMEOUT if self.conn.their_state is self.conn.our_state else BODY_TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _await_headers(self, seconds: float | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds or HEADER_TIMEOUT, self._close_unless_headers_came)

    def _close_unless_headers_came(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn with our protocol and limits: a number of open connections, further ones get status 503; and seconds of
    grace for open requests to end after a signal. An app says in a subclass what a signal does."""

    def __init__(self, app: ASGIApp, connections: int, grace: int):
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=TimedProtocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=connections,
            timeout_graceful_shutdown=grace,
        )
        super().__init__(config)


# Requests and responses


def header(scope: Scope, name: bytes) -> str:
    """Return a request's header; empty if it is missing."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def whole_number(text: str) -> int | None:
    """Read a whole number from 0 to 2**63 - 1 that a request names; None if it is none. The one way in which text from
    a request becomes a number: ``int`` also takes signs and other alphabets, and fails on 5,000 digits."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 19 else None
    return number if number is not None and number < 2**63 else None


async def read_body(request: Request, kind: str, limit: int, noun: str, wanted: str) -> bytes:
    """Read a body of Content-Type ``kind`` and at most ``limit`` bytes; messages call it ``noun``, and ask for
    ``wanted`` instead of another type. Raises HTTPException: 415 for the type, 413 for the size, 408 for a timeout, 499
    for a closed connection."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != kind:
        raise HTTPException(415, f"Content-Type is {given[:60] or 'missing'}. Send {wanted}")
    length = request.headers.get("content-length", "0")
    body = bytearray()
    close = {"Connection": "close"}  # what is still under way is not read
    too_large = HTTPException(413, f"The {noun} is larger than {limit} bytes", close)
    size = whole_number(length)
    if size is None or size > limit:
        raise too_large
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"The {noun} did not arrive within {BODY_TIMEOUT:g} s", close) from None
    except ClientDisconnect:
        raise HTTPException(CLIENT_CLOSED_REQUEST, CLIENT_LEFT) from None
    return bytes(body)


class Guard:
    """ASGI middleware: check each request before the app sees it, add headers, and answer 500 if the app fails.

    Args:
        app: the application to wrap.
        hosts: allowed Host headers without a port; None: any.
        answer: makes a response from a message and a status.
        failed: the message if the app fails.
        headers: of every response; those that a response sets itself stay.
        refuse: further checks; returns the response that refuses a request, or None.
        on_response: called after every response with the request's scope, the status and the seconds that it took.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str] | None,
        answer: Callable[[str, int], Response],
        failed: str,
        headers: Mapping[str, str] = HEADERS,
        refuse: Callable[[Scope], Response | None] = lambda scope: None,
        on_response: Callable[[Scope, int, float], None] = lambda scope, status, seconds: None,
    ):
        self.app = app
        self.hosts = hosts
        self.answer = answer
        self.failed = failed
        self.headers = headers
        self.refuse = refuse
        self.on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        clock, status = time.perf_counter(), 0
        scope["log"] = {}  # an app's routes add to it for ``on_response``

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, given = message["status"], {name.lower() for name, _ in message.get("headers", [])}
                own = [(key.encode(), value.encode()) for key, value in self.headers.items()]
                message = {**message, "headers": [*message.get("headers", []), *(x for x in own if x[0] not in given)]}
            await send(message)

        try:
            # without this check, any site could reach a local server by DNS rebinding
            host = HOST.fullmatch(header(scope, b"host").lower())
            known = self.hosts is None or (host is not None and host["name"] in self.hosts)
            refused = self.refuse(scope) if known else self.answer(UNKNOWN_HOST, 421)
            await (refused or self.app)(scope, receive, send_with_headers)
        except Exception:
            traceback.print_exc()
            if not status:
                await self.answer(self.failed, 500)(scope, receive, send_with_headers)
        finally:
            self.on_response(scope, status or CLIENT_CLOSED_REQUEST, time.perf_counter() - clock)
