"""Start and stop the pages' server."""

from __future__ import annotations

import argparse
import secrets
import signal
from types import FrameType

from starlette.types import ASGIApp

from simpletune.apps.http import HttpServer, bind, is_loopback, loopback_hosts, url_of
from simpletune.apps.web.access import TOKEN, Access
from simpletune.apps.web.app import make_app
from simpletune.apps.web.events import FileWatcher
from simpletune.apps.web.roots import make_roots
from simpletune.system.console import say

CONNECTIONS = 256  # a browser keeps one for its events, and a few more while it loads a page


class PageServer(HttpServer):
    """A server that ends its event streams when it stops; otherwise open pages would keep it running forever."""

    def __init__(self, app: ASGIApp, watch: FileWatcher):
        super().__init__(app, CONNECTIONS, grace=3)
        self.watch = watch

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop on a signal; runs and the queue continue."""
        say(f"{signal.Signals(sig).name}: the page stops; runs and the queue continue")
        self.watch.close()
        super().handle_exit(sig, frame)


def run(args: argparse.Namespace) -> None:
    """Serve the pages until a signal arrives, as the arguments (``cli.serve.web_arguments``) say."""
    roots = make_roots(args.runs, args.root)
    bound = bind(args.host, args.port)
    local = is_loopback(bound)
    token = None if local and not args.token else secrets.token_urlsafe(24)
    app, watch = make_app(roots, Access(loopback_hosts(args.host) if local else None, token))
    say(f"runs in {roots.runs}; pictures and configurations below {', '.join(map(str, roots.named))}")
    if not local:
        say("warning: other machines can reach this page, and nothing is encrypted: use it in a network that you trust")
    say(f"open {url_of(bound)}{f'?{TOKEN}={token}' if token else ''}")
    PageServer(app, watch).run(sockets=[bound])
