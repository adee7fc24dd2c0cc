"""The HTTP application: the route table, and what holds for every route.

A new route or dialect is a line in the table; its errors are exceptions (``errors``), its bodies
are read by ``body``, its long replies are ``sse``'s.
"""

import hmac
import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from dovetail.core.client import EngineClient
from dovetail.server.capture_files import CaptureFolder
from dovetail.server.capture_routes import CaptureRoutes
from dovetail.server.errors import HttpError, error_response, http_error
from dovetail.server.info import InfoRoutes
from dovetail.server.metrics import Metrics
from dovetail.server.native import NativeRoutes
from dovetail.server.openai.chat import ChatRoute
from dovetail.server.openai.completions import CompletionRoute
from dovetail.server.settings import ServerSettings
from dovetail.server.sse import ClientGone
from dovetail.server.traffic import Traffic

OPEN_PATHS = ("/health",)
"""Probes have no key."""

CLIENT_GONE = 499  # in the metrics only: nobody is there to read it
_LOG = logging.getLogger(__name__)


def route_table(
    client: EngineClient,
    traffic: Traffic,
    metrics: Metrics,
    settings: ServerSettings,
    folder: CaptureFolder | None,
    capture: CaptureRoutes,
) -> list[BaseRoute]:
    """Return every route."""
    native = NativeRoutes(client, traffic, settings, folder)
    info = InfoRoutes(client, traffic, metrics, settings)
    chat = ChatRoute(client, traffic, settings)
    completion = CompletionRoute(client, traffic, settings)
    return [
        Route("/generate", native.generate, methods=["POST", "PUT"]),
        Route("/abort_request", native.abort, methods=["POST"]),
        Route("/register_capture_file", capture.register, methods=["POST"]),
        Route("/acknowledge_capture", capture.acknowledge, methods=["POST"]),
        Route("/v1/chat/completions", chat.complete, methods=["POST"]),
        Route("/v1/completions", completion.complete, methods=["POST"]),
        Route("/v1/models", info.models, methods=["GET"]),
        Route("/health", info.health, methods=["GET"]),
        Route("/metrics", info.metrics, methods=["GET"]),
        Route("/server_info", info.server_info, methods=["GET"]),
        Route("/get_server_info", info.server_info, methods=["GET"]),
        Route("/model_info", info.model_info, methods=["GET"]),
        Route("/get_model_info", info.model_info, methods=["GET"]),
    ]


class Application:
    """All routes over one engine, as an ASGI application.

    Every request ends with a status: what a route raises becomes an error reply here, and what
    nobody expected is logged and answered without its details.

    Args:
        client: of a running engine; closed by whoever made it.
        settings: of the server.
        folder: for clients' capture files; None for none. Closed by whoever made it.
        lifespan: runs around the serving; see Starlette.

    """

    def __init__(
        self,
        client: EngineClient,
        settings: ServerSettings,
        folder: CaptureFolder | None = None,
        *,
        lifespan: Lifespan[Any] | None = None,
    ) -> None:
        self._metrics = Metrics(client.stats)
        self._traffic = Traffic(client, self._metrics)
        self._capture = CaptureRoutes(client.config, settings, folder)
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._router: ASGIApp = Router(
            route_table(client, self._traffic, self._metrics, settings, folder, self._capture),
            redirect_slashes=False,
            lifespan=lifespan,
        )

    def drain(self) -> None:
        """Start nothing more; what is open is the engine's to end."""
        self._traffic.drain()
        self._capture.drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close"})
                return
            await self._router(scope, receive, send)
            return
        scope["app"] = self  # makes the router raise what it does not find
        reply = _NotedReply(send)
        status = CLIENT_GONE
        try:
            try:
                self._check_key(scope)
                await self._router(scope, receive, reply.send)
            except (ClientGone, ClientDisconnect):
                return
            except Exception as error:  # the request's last line: answer, and go on
                await self._fail(error, reply, scope, receive)
            status = reply.status or CLIENT_GONE
        finally:
            self._metrics.answered(_route_of(scope), status)

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise HttpError(
                401,
                "the API key is missing or wrong; send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _fail(
        self, error: Exception, reply: "_NotedReply", scope: Scope, receive: Receive
    ) -> None:
        failure = http_error(error)
        if failure.status >= 500:
            is_known = isinstance(error, HttpError | HTTPException) or failure.code is not None
            _LOG.error(
                "%s %s: %s %s",
                scope["method"],
                scope["path"],
                failure.status,
                failure.message if is_known and failure.code != "internal" else repr(error),
                exc_info=error if _LOG.isEnabledFor(logging.DEBUG) else None,
            )
        if reply.status is None:
            await error_response(failure)(scope, receive, reply.send)


class _NotedReply:
    """A ``send`` that remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def _route_of(scope: Scope) -> str:
    """Return the route's own path: what clients make up must not become metrics."""
    route: Any = scope.get("route")
    return getattr(route, "path", "none")
