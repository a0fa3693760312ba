"""Notify open pages of changes: one file watcher for all, and one stream of server-sent events per browser.

A page subscribes by marking elements with ``data-topic``; app.js refreshes them when their topic is named. The stream
carries only names of topics, so any number of streams costs one look at the files per second.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Mapping

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from simpletune.apps.http import whole_number

PERIOD = 1.0  # seconds between two looks at the files
HEARTBEAT = 15.0  # seconds until an idle stream sends a beat: proxies keep it, and a page notices when none comes
KEPT = 1000  # changes for pages that poll
HELLO, BYE = b"retry: 2000\nevent: hello\ndata: []\n\n", b"event: bye\ndata: []\n\n"
BEAT = b"event: beat\ndata: []\n\n"  # no comment: a browser hides those from the page
Look = Callable[[], Mapping[str, Hashable]]
"""Returns a stamp for each topic; a topic has changed when its stamp differs, or when it appears or disappears."""


class FileWatcher:
    """Watch files while somebody listens, and report which topics have changed; ``look`` is called in a thread."""

    def __init__(self, look: Look):
        self.look = look
        self.number = 0  # number of looks that found a change
        self.closed = False
        self._stamps: Mapping[str, Hashable] | None = None
        self._changes: deque[tuple[int, list[str]]] = deque(maxlen=KEPT)
        self._streams: set[asyncio.Queue[bytes]] = set()
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._looked = float("-inf")

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield events until the client leaves or the server stops."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(maxsize=KEPT)
        self._streams.add(queue)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_looking())
        event = BYE if self.closed else HELLO
        try:
            yield event
            while event != BYE:
                try:
                    event = await asyncio.wait_for(queue.get(), HEARTBEAT)
                except TimeoutError:
                    event = BEAT
                yield event
        finally:
            self._streams.discard(queue)

    async def since(self, number: int) -> tuple[int, list[str]]:
        """Return the number of the last change, and the topics changed after ``number``; all topics if that is too
        old."""
        await self.refresh()
        kept_from = self._changes[0][0] if self._changes else self.number + 1
        if number < kept_from - 1 or number > self.number:
            return self.number, sorted(self._stamps or ())
        return self.number, sorted({topic for at, topics in self._changes if at > number for topic in topics})

    async def refresh(self) -> None:
        """Look at the files, at most once per period."""
        async with self._lock:
            clock = asyncio.get_running_loop().time
            if clock() - self._looked < PERIOD / 2:
                return
            stamps = await run_in_threadpool(self.look)
            self._looked = clock()
            before = stamps if self._stamps is None else self._stamps
            changed = sorted(topic for topic in {*before, *stamps} if before.get(topic) != stamps.get(topic))
            self._stamps = stamps
            if changed:
                self.number += 1
                self._changes.append((self.number, changed))
                self._send(f"event: changed\ndata: {json.dumps(changed)}\n\n".encode())

    def close(self) -> None:
        """End all streams."""
        self.closed = True
        self._send(BYE)

    def _send(self, event: bytes) -> None:
        for queue in self._streams:
            if not queue.full():  # a reader that is this far behind refreshes everything when it reconnects
                queue.put_nowait(event)

    async def _keep_looking(self) -> None:
        while self._streams and not self.closed:
            await self.refresh()
            await asyncio.sleep(PERIOD)


async def events(request: Request) -> Response:
    """Send the stream of changes."""
    watch: FileWatcher = request.app.state.watch
    return StreamingResponse(watch.stream(), media_type="text/event-stream")


async def changes(request: Request) -> Response:
    """Send the changes since number ``since``, for pages that poll."""
    since = whole_number(request.query_params.get("since", ""))
    number, topics = await request.app.state.watch.since(-1 if since is None else since)
    return JSONResponse({"number": number, "topics": topics})
