"""What goes wrong, as HTTP: a status and one JSON form for every route and dialect.

Owns the mapping from exceptions to statuses and the form of an error body. Nothing else in the
server makes an error body, so none carries a traceback.
"""

import math
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dovetail.errors import CapacityError, EngineClosed, EngineError, RequestError
from dovetail.wire.result import FinishReason

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class HttpError(Exception):
    """An error that is answered with its own status.

    Attributes:
        status: 4xx or 5xx.
        message: for a human; names what to do.
        param: the request field at fault, or None.
        code: a word that programs can compare, or None.
        headers: to send with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}


def http_error(error: Exception) -> HttpError:
    """Return any exception as what a client is told; one nobody expected tells nothing."""
    match error:
        case HttpError():
            return error
        case RequestError():
            too_long = "context length" in str(error)
            code = "context_length_exceeded" if too_long else None
            return HttpError(400, str(error), param=error.field, code=code)
        case CapacityError():
            headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
            return HttpError(429, str(error), code="server_full", headers=headers)
        case EngineClosed():
            return HttpError(503, str(error), code="engine_closed")
        case EngineError():
            return HttpError(500, str(error))
        case HTTPException():
            return _routing_error(error)
        case _:
            return HttpError(500, "internal error; the server's log has more", code="internal")


def generation_error(reason: FinishReason) -> HttpError:
    """Return what a client is told of a generation that failed: its own mistake, or ours."""
    message = reason.message or "the generation failed"
    if reason.field is None:
        return HttpError(500, message)
    return HttpError(400, f"{reason.field}: {message}", param=reason.field)


def error_body(error: HttpError) -> dict[str, Any]:
    """Return the JSON value of an error."""
    kind = _TYPES.get(
        error.status, "server_error" if error.status >= 500 else "invalid_request_error"
    )
    return {
        "error": {
            "message": _short(error.message, 1000),
            "type": kind,
            "param": None if error.param is None else _short(error.param, 200),
            "code": error.code,
        }
    }


def error_response(error: HttpError) -> Response:
    """Return the whole reply of an error."""
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


def _short(text: str, most: int) -> str:
    """Cut what may hold a client's own words: an error must not echo a whole body."""
    return text if len(text) <= most else text[:most] + "..."


def _routing_error(error: HTTPException) -> HttpError:
    """Name what the router did not find."""
    headers = dict(error.headers or {})
    if error.status_code == 405:
        message = f"wrong method; this route takes {headers.get('Allow', 'another')}"
        return HttpError(405, message, code="method_not_allowed", headers=headers)
    if error.status_code == 404:
        return HttpError(404, "there is no such route; docs/server.md lists them", code="no_route")
    phrase = HTTPStatus(error.status_code).phrase
    return HttpError(error.status_code, error.detail or phrase, headers=headers)
