"""uvicorn's HTTP/1.1 protocol with a timeout for a request's headers, which uvicorn lacks."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT = 10.0  # seconds for a request's headers to arrive, from the connection or the last response


class TimedProtocol(H11Protocol):
    """Close connections whose headers do not arrive in time; otherwise each would occupy a slot forever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout when a client connects."""
        super().connection_made(transport)
        self._await_headers()

    def on_response_complete(self) -> None:
        """Restart the timeout for the next request on this connection."""
        super().on_response_complete()
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(HEADER_TIMEOUT, self._close_unless_headers_came)

    def _close_unless_headers_came(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
