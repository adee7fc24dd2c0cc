"""Replies that may take long, whole or as server-sent events, to clients that may go.

Owns them. Must not know any dialect. An error before the first event is an ordinary error reply;
one after it is an event with an ``error`` object, for the status is out by then.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from dovetail.server.errors import error_body, http_error

PIECE_BYTES = 2**20

DONE = b"[DONE]"

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client has closed its connection; there is nobody to answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, which is cancelled if the client disconnects. The body has been read.

    Raises:
        ClientGone: it has.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class WholeReply:
    """A reply that is made while the client waits. An ASGI application for one request.

    Args:
        contents: yields the content, and is asked for more once that has been sent; closed when the
            client has gone.
        media_type: of the content.
    """

    def __init__(self, contents: AsyncGenerator[bytes, None], media_type: str) -> None:
        self._contents = contents
        self._media_type = media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the content, unless the client has gone."""
        await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._contents) as contents:
            async for content in contents:
                await send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": [
                            (b"content-type", self._media_type.encode()),
                            (b"content-length", str(len(content)).encode()),
                        ],
                    }
                )
                for piece, is_last in _pieces(content):
                    await send(
                        {"type": "http.response.body", "body": piece, "more_body": not is_last}
                    )


def _pieces(content: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield content in pieces, and whether one is the last.

    The event loop copies what the socket does not take at once, and does nothing else meanwhile.
    """
    for begin in range(0, len(content), PIECE_BYTES):
        end = begin + PIECE_BYTES
        yield content[begin:end], end >= len(content)


class EventStream:
    """A reply of server-sent events. An ASGI application for one request.

    Args:
        payloads: the events' data, one after another, each asked for when those before it have
            been sent; closed when the client has gone.
    """

    def __init__(self, payloads: AsyncGenerator[bytes, None]) -> None:
        self._payloads = payloads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the client has gone."""
        await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._payloads) as payloads:
            payload = await anext(payloads, None)  # may raise: then the reply is an error
            await send(_START)
            try:
                while payload is not None:
                    await send(_event(payload))
                    payload = await anext(payloads, None)
            except Exception as error:  # the request's last line: say it, then end
                failure = http_error(error)
                _LOG.error("a stream failed: %s", failure.message)
                await send(_event(msgspec.json.encode(error_body(failure))))
        await send(_event(DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


def _event(payload: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"data: " + payload + b"\n\n", "more_body": True}
