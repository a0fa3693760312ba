"""The address that a server listens on."""

from __future__ import annotations

import ipaddress
import socket

from simpletune.system.options import UserError

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        UserError: the address does not exist or is in use.
    """
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
    """Return the URL of a listening socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def is_loopback(bound: socket.socket) -> bool:
    """Return whether only this machine can reach a listening socket."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def loopback_hosts(host: str) -> set[str]:
    """Return the Host headers that a server on loopback accepts."""
    return {"localhost", LOOPBACK, "[::1]", host, f"[{host}]"}
