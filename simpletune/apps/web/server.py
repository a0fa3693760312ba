"""Start and stop the pages' server."""

from __future__ import annotations

import argparse
import secrets
import signal
from types import FrameType

import uvicorn

from simpletune.apps.serve.address import bind, is_loopback, loopback_hosts, url_of
from simpletune.apps.serve.protocol import TimedProtocol
from simpletune.apps.web.app import Web, make_app
from simpletune.apps.web.guard import TOKEN, Access
from simpletune.apps.web.roots import make_roots
from simpletune.system.console import say


class PageServer(uvicorn.Server):
    """A server that ends its event streams when it stops; otherwise open pages would keep it running forever.

    Args:
        config: uvicorn's configuration.
        web: the application.
    """

    def __init__(self, config: uvicorn.Config, web: Web):
        super().__init__(config)
        self.web = web

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop on a signal; runs and the queue continue."""
        say(f"{signal.Signals(sig).name}: the page stops; runs and the queue continue")
        self.web.watch.close()
        super().handle_exit(sig, frame)


def run(args: argparse.Namespace) -> None:
    """Serve the pages until a signal arrives.

    Args:
        args: defined in ``cli.web.web_arguments``.

    Raises:
        UserError: a folder is missing, or the port is in use.
    """
    roots = make_roots(args.runs, args.root)
    bound = bind(args.host, args.port)
    local = is_loopback(bound)
    token = None if local and not args.token else secrets.token_urlsafe(24)
    web = make_app(roots, Access(loopback_hosts(args.host) if local else None, token))
    config = uvicorn.Config(
        web.app, loop="asyncio", http=TimedProtocol, ws="none", lifespan="off", log_level="warning", access_log=False,
        proxy_headers=False, server_header=False, timeout_graceful_shutdown=3,
    )  # fmt: skip
    say(f"runs in {roots.runs}; pictures and configurations below {', '.join(map(str, roots.named))}")
    if not local:
        say("warning: other machines can reach this page, and nothing is encrypted: use it in a network that you trust")
    say(f"open {url_of(bound)}{f'?{TOKEN}={token}' if token else ''}")
    PageServer(config, web).run(sockets=[bound])
