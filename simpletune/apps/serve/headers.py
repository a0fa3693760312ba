"""Headers of every response, and the check of the Host header. ``simpletune.apps.web`` uses them too."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.types import Message, Scope

HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\s:@/\[\]]+)(:[0-9]{1,5})?")
UNKNOWN_HOST = "Unknown Host header. Use the address that the server printed"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def header(scope: Scope, name: bytes) -> str:
    """Return a request's header in lower case; empty if it is missing."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "").lower()


def has_known_host(scope: Scope, hosts: Collection[str] | None) -> bool:
    """Return whether the Host header is allowed; without this check, any site could reach a local server by DNS
    rebinding.

    Args:
        scope: the request's scope.
        hosts: allowed names without a port; None: any.
    """
    if hosts is None:
        return True
    whole = HOST.fullmatch(header(scope, b"host"))
    return whole is not None and whole["name"] in hosts


def with_headers(message: Message, headers: dict[str, str]) -> Message:
    """Add headers to the start of a response; headers that the response sets itself stay."""
    given = {name.lower() for name, _ in message.get("headers", [])}
    extra = [(name.encode(), value.encode()) for name, value in headers.items() if name.encode() not in given]
    return {**message, "headers": [*message.get("headers", []), *extra]}
