"""What holds for every route, on an application without a server or an engine."""

import asyncio
import json
import logging
from typing import Any
from unittest.mock import Mock

import pytest

from dovetail.errors import CapacityError, DeviceError, EngineClosed, InvariantError, RequestError
from dovetail.server.app import Application
from dovetail.server.errors import HttpError, http_error
from dovetail.server.settings import ServerSettings
from dovetail.wire.status import EngineStats


def call(app: Application, path: str, body: bytes = b"", method: str = "GET") -> tuple[int, Any]:
    """Send one request through ASGI; return status and JSON."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent))


@pytest.fixture
def client() -> Mock:
    stats = EngineStats(
        num_running=0,
        num_waiting=0,
        num_pages=1,
        num_free_pages=1,
        num_cached_pages=0,
        num_cached_tokens=0,
    )
    return Mock(stats=Mock(return_value=stats))


@pytest.fixture
def app(client: Mock) -> Application:
    return Application(client, ServerSettings(model_name="m", version="0"))


def test_what_nobody_expected_tells_the_log_and_not_the_client(
    client: Mock, app: Application, caplog: pytest.LogCaptureFixture
) -> None:
    client.health.side_effect = ZeroDivisionError("secret of the inside")
    status, body = call(app, "/health")
    assert status == 500 and body["error"]["code"] == "internal"
    assert "secret" not in json.dumps(body)
    [record] = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info is None
    assert record.getMessage() == ("GET /health: 500 ZeroDivisionError('secret of the inside')")
    caplog.set_level(logging.DEBUG)
    call(app, "/health")
    assert caplog.records[-1].exc_info is not None


def test_mistakes_of_clients_are_not_logged(
    app: Application, caplog: pytest.LogCaptureFixture
) -> None:
    assert call(app, "/nothing")[0] == 404
    assert call(app, "/generate", b"{", "POST")[0] == 400
    assert caplog.records == []


def test_an_ending_server_takes_nothing_and_says_so(client: Mock, app: Application) -> None:
    client.health.return_value = Mock(state="alive", reason="")
    assert call(app, "/health")[0] == 200
    app.drain()
    status, body = call(app, "/health")
    assert status == 503 and body["error"]["code"] == "draining"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("f", "is wrong"), 400, None),
        (RequestError("f", "over the context length"), 400, "context_length_exceeded"),
        (CapacityError("full", retry_after_s=0.2), 429, "server_full"),
        (EngineClosed("gone"), 503, "engine_closed"),
        (DeviceError("broken"), 500, None),
        (InvariantError("a bug"), 500, None),
        (HttpError(418, "tea", code="pot"), 418, "pot"),
        (ValueError("x"), 500, "internal"),
    ],
)
def test_exceptions_have_a_status(error: Exception, status: int, code: str | None) -> None:
    found = http_error(error)
    assert (found.status, found.code) == (status, code)
    if status == 429:
        assert found.headers["Retry-After"] == "1", "never 0: that is no pause"


def test_a_body_that_does_not_come_is_given_up(client: Mock) -> None:
    app = Application(client, ServerSettings(model_name="m", version="0", body_s=0.01))

    async def receive() -> dict[str, Any]:
        if not sent_first:
            sent_first.append(True)
            return {"type": "http.request", "body": b"{", "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError

    sent_first: list[bool] = []
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    path = "/generate"
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 408 and b"body_too_slow" in sent[1]["body"]
