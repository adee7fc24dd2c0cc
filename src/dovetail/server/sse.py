"""Replies that may take long, whole or as server-sent events, to clients that may go.

Owns them. Must not know any dialect. An error before the first event is an ordinary error reply;
one after it is an event with an ``error`` object, for the status is out by then.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from dovetail.core.routes import Pieces
from dovetail.server.errors import error_body, http_error

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

    def __init__(self, contents: AsyncGenerator[Pieces, None], media_type: str) -> None:
        self._contents = contents
        self._media_type = media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the content, unless the client has gone."""
        await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._contents) as contents:
            async for pieces in contents:
                await send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": [
                            (b"content-type", self._media_type.encode()),
                            (b"content-length", str(sum(map(len, pieces))).encode()),
                        ],
                    }
                )
                for number, piece in enumerate(pieces, start=1):
                    await send(_body(piece, more=number < len(pieces)))


class EventStream:
    """A reply of server-sent events. An ASGI application for one request.

    Args:
        payloads: the events' data, one after another, each asked for when those before it have
            been sent; closed when the client has gone.
    """

    def __init__(self, payloads: AsyncGenerator[Pieces, None]) -> None:
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
                    for message in _event(payload):
                        await send(message)
                    payload = await anext(payloads, None)
            except Exception as error:  # the request's last line: say it, then end
                failure = http_error(error)
                _LOG.error("a stream failed: %s", failure.message)
                [message] = _event([msgspec.json.encode(error_body(failure))])
                await send(message)
        [message] = _event([DONE])
        await send(message)
        await send(_body(b"", more=False))


_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


def _event(payload: Pieces) -> list[Message]:
    """Return the messages of an event: one, but for a payload of several pieces."""
    first, *others = payload
    pieces = [b"data: " + first, *others]
    pieces[-1] += b"\n\n"
    return [_body(piece, more=True) for piece in pieces]


def _body(piece: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": more}
