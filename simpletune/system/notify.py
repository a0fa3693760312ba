"""Post what happens to a run to the URL in SIMPLETUNE_NOTIFY_URL: to Slack, Discord or ntfy, otherwise as JSON.

The URL is a secret, so it stands in no configuration, and what is said about a failure names only the service and host.
"""

from __future__ import annotations

import base64
import io
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from simpletune.system.console import say
from simpletune.system.options import UserError
from simpletune.system.redact import redact

if TYPE_CHECKING:
    from urllib.request import Request

    from PIL.Image import Image

VARIABLE = "SIMPLETUNE_NOTIFY_URL"
TIMEOUT = 5.0  # seconds for an answer
WAIT = 8.0  # seconds that the end of a run waits for what is still to be sent
PENDING = 4  # messages that wait to be sent; more are dropped
LONGEST = 1000  # characters; Discord takes 2000
SIDE, QUALITY = 1600, 85  # of a JPEG: the free ntfy.sh takes 2 MB, Discord 10 MB


class Message(NamedTuple):
    """One line about a run: ``event`` is finished, stopped, failed, killed, validation or test."""

    run: str
    event: str
    text: str
    image: bytes | None = None  # a JPEG

    @property
    def line(self) -> str:
        return f"{self.run} {self.event}: {' '.join(redact(self.text).split())}"[:LONGEST]


@dataclass(frozen=True)
class Receiver:
    """Where messages go."""

    service: str  # Slack, Discord, ntfy or JSON
    host: str
    url: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.service} ({self.host})"

    def post(self, message: Message) -> str:
        """Post a message; return why that failed, in a line without the URL, or an empty text."""
        from urllib.error import HTTPError, URLError
        from urllib.request import HTTPRedirectHandler, build_opener

        class NoRedirects(HTTPRedirectHandler):  # which could send the message to anyone
            def redirect_request(self, *_: object) -> None:
                return None

        try:
            build_opener(NoRedirects).open(self.request(message), timeout=TIMEOUT).close()
        except HTTPError as error:
            error.close()
            why = f"HTTP {error.code}"
        except URLError as error:
            why = getattr(error.reason, "strerror", None) or type(error.reason).__name__
        except Exception as error:  # the text of http.client's own errors contains the path
            why = type(error).__name__
        else:
            return ""
        return f"{self} did not take a message ({why})"

    def request(self, message: Message) -> Request:
        """Return the request that the service expects."""
        from urllib.request import Request

        parts = urlsplit(self.url)
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        headers = {"User-Agent": "simpletune"}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        method, body = "POST", b""
        if self.service == "ntfy":
            body, title = message.line.encode(), f"{message.run} {message.event}"
            if message.image is not None:
                method, body = "PUT", message.image
                headers |= {"Filename": "samples.jpg", "Message": message.line.encode("ascii", "replace").decode()}
            return Request(url, body, {**headers, "Title": title}, method=method)
        headers["Content-Type"] = "application/json"
        if self.service == "Slack":  # its webhooks take no picture
            line = message.line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            body = json.dumps({"text": line}).encode()
        elif self.service == "Discord":
            body = json.dumps({"content": message.line, "allowed_mentions": {"parse": []}}).encode()
            if message.image is not None:
                edge = secrets.token_hex(16)
                headers["Content-Type"] = f"multipart/form-data; boundary={edge}"
                body = _multipart(edge, body, message.image)
        else:  # text alone is what Mattermost, Rocket.Chat and others read
            body = json.dumps({"run": message.run, "event": message.event, "text": message.line}).encode()
        return Request(url, body, headers, method=method)


def _multipart(edge: str, payload: bytes, image: bytes) -> bytes:
    """Build Discord's form of a message with a file."""
    part = f"--{edge}\r\nContent-Disposition: form-data; name="
    return b"".join(
        [
            f'{part}"payload_json"\r\nContent-Type: application/json\r\n\r\n'.encode(),
            payload,
            f'\r\n{part}"files[0]"; filename="samples.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'.encode(),
            image,
            f"\r\n--{edge}--\r\n".encode(),
        ]
    )


def find_receiver(environment: Mapping[str, str] = os.environ) -> Receiver | None:
    """Return where messages go; None if the variable is not set. Raises UserError if it is no URL."""
    url = environment.get(VARIABLE, "").strip()
    if not url:
        return None
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        host = ""
    if not host or parts.scheme not in ("http", "https") or not url.isascii() or not url.isprintable() or " " in url:
        raise UserError(f"{VARIABLE} is no http or https URL, so no message is sent. Correct or unset it")
    if host == "hooks.slack.com":
        service = "Slack"
    elif f".{host}".endswith((".discord.com", ".discordapp.com")):
        service = "Discord"
    elif "ntfy" in host.split("."):
        service = "ntfy"
    else:
        service = "JSON"
    return Receiver(service, host, url)


def receiver_or_none() -> Receiver | None:
    """Return where messages go; None, with a warning, if the variable is no URL."""
    try:
        return find_receiver()
    except UserError as error:
        say(f"warning {error}")
        return None


class Sender:
    """Post messages from a thread, so that a slow server delays no step. Warns of the first failure only.

    Args:
        warn: prints a warning.
    """

    def __init__(self, receiver: Receiver, warn: Callable[[str], None]):
        self.receiver = receiver
        self._warn = warn
        self._warned = False
        self._answered = False
        self._messages: queue.Queue[Message | None] = queue.Queue(PENDING)
        self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message soon; drop it if others wait already."""
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            self._fail(f"{self.receiver} is slow: a message was dropped")

    def close(self) -> None:
        """Wait for what is still to be sent, at most ``WAIT`` seconds."""
        late = time.monotonic() + WAIT
        with suppress(queue.Full):  # the server is slow: what still waits then ends with the process
            self._messages.put(None, timeout=WAIT)
        self._thread.join(max(0.0, late - time.monotonic()))
        if self._thread.is_alive():
            what = "is slow: the last messages were not sent" if self._answered else f"did not answer within {WAIT:g} s"
            self._fail(f"{self.receiver} {what}")

    def _work(self) -> None:
        while (message := self._messages.get()) is not None:
            why = self.receiver.post(message)
            self._answered = self._answered or not why
            if why:
                self._fail(why)

    def _fail(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"notification: {why}")


def post_now(receiver: Receiver, message: Message) -> None:
    """Post a message, and wait for that at most ``WAIT`` seconds."""
    sender = Sender(receiver, lambda text: say(f"warning {text}"))
    sender.send(message)
    sender.close()


def as_jpeg(image: Image) -> bytes:
    """Encode an image as a JPEG small enough for every service."""
    small, file = image.convert("RGB"), io.BytesIO()
    small.thumbnail((SIDE, SIDE))
    small.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
