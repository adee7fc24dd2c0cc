"""Replies that take long: their makers learn whether they were sent."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from dovetail.server.sse import ClientGone, EventStream, WholeReply

KINDS: list[Callable[[AsyncGenerator[list[bytes], None]], Any]] = [
    EventStream,
    lambda contents: WholeReply(contents, "text/plain"),
]


def run(kind: Callable[..., Any], *, leaves: bool) -> list[str]:
    """Send a reply of one content; return what its maker has seen."""
    seen: list[str] = []

    async def contents() -> AsyncGenerator[list[bytes], None]:
        try:
            yield [b"ro", b"ws"]
            seen.append("sent")
        finally:
            seen.append("closed")

    async def serve() -> None:
        is_sending, body = asyncio.Event(), list[bytes]()

        async def receive() -> dict[str, Any]:
            await (is_sending.wait() if leaves else asyncio.Event().wait())
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            body.append(message.get("body", b""))
            if leaves and b"ro" in message.get("body", b""):
                is_sending.set()
                await asyncio.Event().wait()  # a client that does not read

        await kind(contents())({"type": "http"}, receive, send)
        assert b"rows" in b"".join(body)

    if leaves:
        with pytest.raises(ClientGone):
            asyncio.run(serve())
    else:
        asyncio.run(serve())
    return seen


@pytest.mark.parametrize("kind", KINDS, ids=["stream", "whole"])
def test_the_maker_is_asked_for_more_only_once_its_content_was_sent(kind: Any) -> None:
    assert run(kind, leaves=False) == ["sent", "closed"]
    assert run(kind, leaves=True) == ["closed"]
