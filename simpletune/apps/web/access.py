"""Access to the pages: the token, and the origin of requests that change something; and the responses' headers."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import Scope

from simpletune.apps import http
from simpletune.apps.http import header

HEADERS = {
    **http.HEADERS,
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "referrer-policy": "same-origin",
}
COOKIE, TOKEN = "simpletune", "token"
SAFE = ("GET", "HEAD")
FAILED = "The page failed; the terminal that runs it has the traceback. Reload to continue; runs are not affected"
NO_TOKEN = "A token is needed. Open the whole address that the terminal printed, ?token=... included"
OTHER_SITE = "The request came from another site, or its Origin header is missing. Open the page and try there"


@dataclass(frozen=True)
class Access:
    """Who has access."""

    hosts: Collection[str] | None  # allowed Host headers without a port; None: any
    token: str | None = None  # the secret in the address; None: none is required

    def refusal(self, scope: Scope) -> Response | None:
        """Return the response that refuses a request; None if it may pass."""
        # browsers name the page that sent a request; one that changes something must come from a page of this server
        own = {f"{scheme}://{header(scope, b'host').lower()}" for scheme in ("http", "https")}
        if scope["method"] not in SAFE and header(scope, b"origin").lower() not in own:
            return PlainTextResponse(OTHER_SITE, 403)
        token = self.token
        if token is None:
            return None
        try:
            cookie = SimpleCookie(header(scope, b"cookie")).get(COOKIE)
        except CookieError:
            cookie = None
        if cookie is not None and secrets.compare_digest(cookie.value.encode(), token.encode()):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == TOKEN), "")
        if scope["method"] not in SAFE or not secrets.compare_digest(given.encode(), token.encode()):
            return PlainTextResponse(NO_TOKEN, 401)
        rest = urlencode([pair for pair in query if pair[0] != TOKEN])
        path = "/" + scope["path"].lstrip("/")  # "//host" would lead to another site
        response = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict", path="/")
        return response
