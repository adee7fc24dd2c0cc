"""A server's life: from a bound socket to its last answer.

Owns signals and the order of ending: nothing new starts, the engine aborts what is open, each
client gets its last answer, the engine ends. All of it within seconds. An engine that has died ends
its server in the same order.
"""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import uvicorn

from dovetail.core.client import EngineClient
from dovetail.errors import ConfigError
from dovetail.server.app import Application
from dovetail.server.capture_files import CaptureFolder
from dovetail.server.connection import Connection
from dovetail.server.settings import ServerSettings

BACKLOG = 2048
EXIT_INTERRUPTED = 130
EXIT_ENGINE_DIED = 1
LOOK_S = 0.25
"""How often the engine is looked at."""
_LOG = logging.getLogger(__name__)

THREADS_S = 0.5
"""How long bodies that are being read on threads may hold up the end."""

FORCE_S = 0.3
"""How long routes may take whose connection has been cut."""


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that holds the port and refuses connections until it listens.

    Raises:
        ConfigError: the port is taken, or there is no such host.
    """
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError("host", f"{host!r} is no address of this machine: {error}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_bind(host, port, error) from None
    return sock


def url_of(sock: socket.socket) -> str:
    """Return where a server on this socket is found."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer:
    """Serves one engine until a signal ends it; closes the engine.

    Args:
        client: of a running engine.
        settings: of the server.
        sock: from ``bound_socket``.
        folder: for clients' capture files, or None; closed by whoever made it.
        on_ready: called once requests are taken.
    """

    def __init__(
        self,
        client: EngineClient,
        settings: ServerSettings,
        sock: socket.socket,
        folder: CaptureFolder | None = None,
        *,
        on_ready: Callable[[], None],
    ) -> None:
        self._client = client
        self._sock = sock
        self._on_ready = on_ready
        self._app = Application(client, settings, folder, lifespan=self._lifespan)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                http=Connection,
                log_config=None,
                log_level="error",  # it warns of each client that speaks no HTTP
                access_log=False,
                server_header=False,
                lifespan="on",
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=settings.keep_alive_s,
            )
        )
        self._drain_s = settings.drain_s
        self._signal = 0
        self._has_died = False
        self._closer = ThreadPoolExecutor(1)  # its own: those of bodies may all be busy
        self._overtime = threading.Timer(THREADS_S, lambda: os._exit(self._exit_code))
        self._overtime.daemon = True
        self._closing: asyncio.Future[None] | None = None
        self._patience: asyncio.Task[None] | None = None

    def run(self) -> int:
        """Serve; return the exit code, which is 1 if the engine died. Call it on the main thread.

        Raises:
            ConfigError: another server took the port since it was bound.
        """
        try:
            self._sock.listen(BACKLOG)
        except OSError as error:
            host, port = self._sock.getsockname()[:2]
            raise _cannot_bind(host, port, error) from None
        asyncio.run(self._serve())
        self._overtime.cancel()
        return self._exit_code

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._sock])
        # Work that is on a thread cannot be cancelled, and asyncio is about to wait for it.
        self._overtime.start()

    @property
    def _exit_code(self) -> int:
        if self._has_died:
            return EXIT_ENGINE_DIED
        return EXIT_INTERRUPTED if self._signal == signal.SIGINT else 0

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        # They take the place of uvicorn's, which would raise the signal again in the end.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        watch = asyncio.create_task(self._watch_engine())
        self._on_ready()
        try:
            yield
        finally:
            watch.cancel()
            await self._end()

    async def _watch_engine(self) -> None:
        """End the server when its engine has died: whoever watches the process starts another.

        By then each open request has got its error from the engine's client.
        """
        while not self._signal:
            health = self._client.health()
            if health.state == "dead":
                self._has_died = True
                _LOG.error("the engine has died, and the server ends: %s", health.reason)
                self._end()
                self._server.should_exit = True
                return
            await asyncio.sleep(LOOK_S)

    def _on_signal(self, number: int) -> None:
        if self._signal:  # the second one: at once; the engine sees that it is alone, and ends
            os._exit(EXIT_INTERRUPTED)
        self._signal = number
        self._end()
        self._server.should_exit = True

    def _end(self) -> "asyncio.Future[None]":
        """Begin to end: the engine aborts what is open, and the routes write their last answers."""
        self._app.drain()
        if self._closing is None:
            loop = asyncio.get_running_loop()
            self._closing = loop.run_in_executor(self._closer, self._client.close)
            self._patience = asyncio.create_task(self._lose_patience(self._closing))
        return self._closing

    async def _lose_patience(self, closing: "asyncio.Future[None]") -> None:
        """Leave clients that do not read their last answer, some time after it was made."""
        await closing
        await asyncio.sleep(self._drain_s)
        # From Python 3.12 on, a server is closed only when its connections are, and one with bytes
        # that nobody reads closes never.
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        # Their routes end by that. Should one not, uvicorn leaves it, and says so with a traceback.
        await asyncio.sleep(FORCE_S)
        self._server.force_exit = True


def _cannot_bind(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        "port",
        f"{port} on {host} cannot be used ({error.strerror}); give another --port, "
        "or end what uses it",
    )
