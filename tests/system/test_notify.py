"""Notifications: the form of each service, and a URL that nothing repeats."""

from __future__ import annotations

import json
import time

import pytest
from inbox import Inbox
from PIL import Image

from simpletune.system import notify
from simpletune.system.notify import VARIABLE, Message, Receiver, Sender, as_jpeg, find_receiver
from simpletune.system.options import UserError
from simpletune.system.redact import redact

SECRET = "/T00/B00/AbCdEf123"
LINE = "demo failed: loss <nan> & gone"


def message(image: bytes | None = None) -> Message:
    return Message("demo", "failed", "loss <nan> &\n gone", image)


@pytest.mark.parametrize(
    ("url", "service"),
    [
        ("https://hooks.slack.com/services/T0/B0/x", "Slack"),
        ("https://discord.com/api/webhooks/1/x", "Discord"),
        ("https://canary.discordapp.com/api/webhooks/1/x", "Discord"),
        ("https://ntfy.sh/topic", "ntfy"),
        ("http://ntfy.example.org:8080/topic", "ntfy"),
        ("https://notdiscord.com/x", "JSON"),
        ("http://hooks.slack.com.example.org/x", "JSON"),
    ],
)
def test_the_host_names_the_service(url: str, service: str) -> None:
    found = find_receiver({VARIABLE: f" {url}\n"})
    assert found is not None and (found.service, found.url) == (service, url)
    assert url not in repr(found) and url not in str(found)


@pytest.mark.parametrize(
    "url",
    ["ntfy.sh/x", "file:///etc/x", "ftp://a.org/x", "http://", "http://a:b/x", "https://a.org/ä", "https://a b/c"],
)
def test_what_is_no_url_is_said_and_not_repeated(url: str) -> None:
    with pytest.raises(UserError, match="no http or https URL") as caught:
        find_receiver({VARIABLE: url})
    assert url not in str(caught.value)


def test_without_a_url_nobody_is_notified() -> None:
    assert find_receiver({}) is None and find_receiver({VARIABLE: ""}) is None


def test_each_service_gets_its_form() -> None:
    image = as_jpeg(Image.new("RGBA", (4000, 20), "red"))
    assert image.startswith(b"\xff\xd8")
    with Inbox() as inbox:
        for service in ("Slack", "Discord", "ntfy", "JSON"):
            receiver = Receiver(service, "127.0.0.1", inbox.url.replace("//", "//me:p%40ss@") + SECRET)
            assert receiver.post(message()) == "" == receiver.post(message(image))
    slack, _, discord, drawn, ntfy, attached, plain, _ = inbox.posted
    assert {each.path for each in inbox.posted} == {SECRET}
    assert {each.headers["Authorization"] for each in inbox.posted} == {"Basic bWU6cEBzcw=="}
    assert json.loads(slack.body) == {"text": "demo failed: loss &lt;nan&gt; &amp; gone"}
    assert json.loads(discord.body) == {"content": LINE, "allowed_mentions": {"parse": []}}
    kind, _, edge = drawn.headers["Content-Type"].partition("; boundary=")
    parts = drawn.body.split(f"--{edge}".encode())
    assert kind == "multipart/form-data" and len(parts) == 4 and parts[3] == b"--\r\n"
    assert b'name="payload_json"' in parts[1] and json.loads(parts[1].partition(b"\r\n\r\n")[2])["content"] == LINE
    assert b'name="files[0]"; filename="samples.jpg"' in parts[2]
    assert parts[2].partition(b"\r\n\r\n")[2] == image + b"\r\n"
    assert (ntfy.method, ntfy.headers["Title"], ntfy.body.decode()) == ("POST", "demo failed", LINE)
    assert (attached.method, attached.headers["Filename"], attached.body) == ("PUT", "samples.jpg", image)
    assert attached.headers["Message"] == LINE
    assert json.loads(plain.body) == {"run": "demo", "event": "failed", "text": LINE}


@pytest.mark.parametrize("status", [302, 307, 404, 500])
def test_a_refusal_is_one_line_and_redirects_are_not_followed(status: int) -> None:
    with Inbox(status) as inbox:
        said = Receiver("JSON", "127.0.0.1", inbox.url + SECRET).post(message())
    assert said == f"JSON (127.0.0.1) did not take a message (HTTP {status})"
    assert [each.path for each in inbox.posted] == [SECRET]


def test_what_cannot_be_reached_or_parsed_does_not_show_the_path() -> None:
    for url, why in ((f"http://127.0.0.1:9{SECRET}", "Connection refused"), (f"http://127.0.0.1{SECRET} x", "Invalid")):
        said = Receiver("Slack", "127.0.0.1", url).post(message())
        assert why in said and SECRET not in said and "\n" not in said


def test_a_server_that_hangs_delays_little_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "WAIT", 60.0)
    warned: list[str] = []
    with Inbox(hangs=True) as inbox:
        sender = Sender(Receiver("Slack", "127.0.0.1", inbox.url + SECRET), warned.append)
        for _ in range(2 * notify.PENDING):
            sender.send(message())
        monkeypatch.setattr(notify, "WAIT", 0.1)
        sender.close()
        assert len(inbox.posted) <= 1, "while the server still has the first, all are sent and the end is reached"
    assert warned == ["notification: Slack (127.0.0.1) is slow: a message was dropped"]


def test_after_a_burst_the_end_waits_no_longer_than_the_server_takes() -> None:
    """A full queue once took the end's mark away: 8 s, and "did not answer", however fast the server was."""
    warned: list[str] = []
    with Inbox() as inbox:
        receiver = Receiver("JSON", "127.0.0.1", inbox.url + SECRET)
        sender, began = Sender(receiver, warned.append), time.monotonic()
        for _ in range(notify.PENDING):
            sender._messages.put(message())
        sender.close()
    assert time.monotonic() - began < 4 and not sender._thread.is_alive()
    assert len(inbox.posted) == notify.PENDING and warned == []


def test_the_url_is_a_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"https://hooks.slack.com/services{SECRET}"
    monkeypatch.setenv(VARIABLE, url)
    assert redact(f"no answer from {url}") == "no answer from ***"
    assert Message("a", "failed", f"at {url}").line == "a failed: at ***"
