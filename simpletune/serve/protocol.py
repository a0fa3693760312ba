"""HTTP/1.1 as uvicorn speaks it, with a limit on the time that a request's headers may take: uvicorn has none."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT = 10.0  # seconds for a request's headers to arrive, counted from the connection or the last answer


class TimedProtocol(H11Protocol):
    """Closes a connection on which no whole header has arrived in time; otherwise each would hold a place for ever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._await_headers()

    def on_response_complete(self) -> None:
        """A response has been sent: the next request may come."""
        super().on_response_complete()
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
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
