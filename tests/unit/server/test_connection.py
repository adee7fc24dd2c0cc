"""Connections that send slowly, or too early, or leave: what is closed, and what is said of it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from dovetail.server.connection import Connection
from dovetail.server.delivery import Delivery, delivery_of

HEAD_S = 0.2
LONG_S = 20.0
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def answer(scope: Scope, receive: Receive, send: Send, body: bytes = b"ok") -> None:
    """Answer at once, whatever of the body has come."""
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def served(
    app: App = answer, head_s: float = HEAD_S, on_eof: Callable[[], None] | None = None
) -> AsyncIterator[int]:
    """Yield the port of a server that has no more than a protocol."""
    loop, state = asyncio.get_running_loop(), ServerState()
    config = uvicorn.Config(app, http=Connection, log_config=None, log_level="error", ws="none")

    def connection() -> Connection:
        made = Connection(config=config, server_state=state, app_state={}, _loop=loop)
        made.head_s = head_s
        received = made.eof_received

        def eof_received() -> None:
            if on_eof is not None:
                on_eof()
            received()

        made.eof_received = eof_received
        return made

    server = await loop.create_server(connection, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*state.tasks)
    for left in list(state.connections):
        left.transport.abort()


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LONG_S))


# -- time ------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [b"", REQUEST])
def test_a_head_that_comes_slowly_is_given_up(before: bytes) -> None:
    """Also one whose bytes keep coming; and behind a request that was whole."""

    async def test() -> None:
        async with served() as port:
            reader, writer = await connect(port)
            writer.write(before)
            if before:
                await reader.readuntil(b"ok")

            began = asyncio.get_running_loop().time()
            for byte in b"GET / HTTP/1.1\r\nHost: " + b"x" * 1000:
                writer.write(bytes([byte]))
                await asyncio.sleep(HEAD_S / 20)
                # What comes when it closes would make the kernel drop the reply.
                if asyncio.get_running_loop().time() - began > HEAD_S / 2:
                    break
            reply = await reader.read()
            assert reply.startswith(b"HTTP/1.1 408 ") and b'"head_too_slow"' in reply
            writer.close()

    run(test())


def test_a_connection_that_asks_nothing_is_closed_without_a_word() -> None:
    async def test() -> None:
        async with served() as port:
            reader, writer = await connect(port)
            assert await reader.read() == b""
            writer.close()

    run(test())


def test_the_rest_of_a_body_that_nobody_waits_for_ends() -> None:
    """It was answered before it had come, as a body that is too long is."""

    async def test() -> None:
        async with served() as port:
            reader, writer = await connect(port)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
            await reader.readuntil(b"ok")
            while not writer.is_closing():
                writer.write(b"x")
                await asyncio.sleep(HEAD_S / 20)
            writer.close()

    run(test())


def test_who_sends_at_once_is_kept() -> None:
    """An idle connection between two requests, a slow body and a slow answer are no slow heads."""

    async def test() -> None:
        async def slow_answer(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive())["more_body"]:
                pass
            await asyncio.sleep(2.5 * HEAD_S)
            await answer(scope, receive, send)

        async with served(slow_answer) as port:
            reader, writer = await connect(port)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{")
            await asyncio.sleep(2 * HEAD_S)
            writer.write(b"}GET")  # the next one begins early, and waits for its turn
            await reader.readuntil(b"ok")
            await asyncio.sleep(0.7 * HEAD_S)
            writer.write(b" / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"ok")
            await asyncio.sleep(2 * HEAD_S)
            writer.write(REQUEST)
            await reader.readuntil(b"ok")
            writer.close()

    run(test())


# -- delivery ----------------------------------------------------------------------------------


async def fate(
    client: Callable[[socket.socket], Awaitable[None]], *, early: bool, body: bytes
) -> bool:
    """Return whether a reply has failed for a client that does this, once all is over.

    With ``early`` the client does it just before the reply is sent, and the server has not looked.
    """
    found: list[Delivery] = []
    calls: list[Delivery] = []
    sock = socket.socket()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        delivery = delivery_of(scope)
        found.append(delivery)
        if early:
            await client(sock)
        await answer(scope, receive, send, body)
        delivery.on_failure(lambda: calls.append(delivery))

    loop = asyncio.get_running_loop()
    async with served(app, LONG_S) as port:
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, REQUEST)
        while not found:
            await asyncio.sleep(0.01)
        if not early:
            await client(sock)
        await asyncio.sleep(0.05)
        sock.close()
        await asyncio.sleep(0.05)
        assert calls == [one for one in found if one.has_failed]
    return found[0].has_failed


async def read(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    data = b""
    while not data.endswith(b"ok"):
        data += await loop.sock_recv(sock, 1000)


async def read_a_part(sock: socket.socket) -> None:
    await asyncio.get_running_loop().sock_recv(sock, 5)


async def ask_again(sock: socket.socket) -> None:
    await read(sock)
    await asyncio.get_running_loop().sock_sendall(sock, REQUEST)
    await asyncio.sleep(0.05)


async def close(sock: socket.socket) -> None:
    sock.close()


async def nothing(sock: socket.socket) -> None:
    pass


@pytest.mark.parametrize(
    ("client", "early", "body", "has_failed"),
    [
        (read, False, b"ok", False),
        (ask_again, False, b"ok", False),  # what was not read is the second reply
        (nothing, False, b"ok", True),
        (read_a_part, False, b"ok", True),
        (close, True, b"ok", True),
        (close, True, b"", True),  # one write: the error of the next would come too late
    ],
)
def test_the_kernel_tells_what_was_not_read(
    client: Callable[[socket.socket], Awaitable[None]], early: bool, body: bytes, has_failed: bool
) -> None:
    async def test() -> None:
        assert await fate(client, early=early, body=body) == has_failed

    run(test())


@pytest.mark.parametrize("is_known", [False, True])
def test_a_client_that_had_left_before_the_reply_has_not_read_it(is_known: bool) -> None:
    """The server drops what is sent then, in silence: once it knows, and while it gets to know."""

    async def test() -> None:
        has_gone = asyncio.Event()
        calls: list[str] = []

        async def late(scope: Scope, receive: Receive, send: Send) -> None:
            await has_gone.wait()
            await answer(scope, receive, send)
            delivery_of(scope).on_failure(lambda: calls.append("failed"))

        on_eof = None if is_known else has_gone.set
        async with served(late, LONG_S, on_eof) as port:
            _, writer = await connect(port)
            writer.write(REQUEST)
            await asyncio.sleep(0.05)
            writer.close()
            await asyncio.sleep(0.05)
            has_gone.set()
        await asyncio.sleep(0.05)
        assert calls == ["failed"]

    run(test())
