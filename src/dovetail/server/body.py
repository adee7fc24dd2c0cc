"""From the bytes of a request to plain JSON values.

Owns the bound on a body, the reading of JSON, and errors that name the field at fault. Of duplicate
keys the last one counts. Must not know what any field means.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from starlette.requests import Request as HttpRequest

from dovetail.errors import RequestError
from dovetail.server.errors import HttpError
from dovetail.server.settings import ServerSettings

LONG_WORK_BYTES = 32 * 1024
"""Bodies and replies from this size on are worked at off the event loop."""

SEARCHED_BYTES = 256 * 1024
"""Bodies up to this size are searched for the field that is no JSON; the search is slow."""

T = TypeVar("T")


class Body(NamedTuple):
    """A request's body.

    Attributes:
        fields: of the JSON object, without those that are null: clients send null for what they
            leave open, so null and absent are one thing.
        num_bytes: of the body, as a measure of the work that it brings.
    """

    fields: dict[str, Any]
    num_bytes: int


async def read_body(request: HttpRequest, settings: ServerSettings) -> Body:
    """Return the body of a request, which must be a JSON object.

    Raises:
        HttpError: the body is too long (413), too slow (408) or of a wrong content type (415).
        RequestError: it is no JSON object, or holds a number or text that JSON cannot carry.
    """
    _check_content_type(request)
    try:
        async with asyncio.timeout(settings.body_s):
            data = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_s:g} s; send it at once"
        raise HttpError(408, message, code="body_too_slow") from None
    raw = await off_loop(len(data), lambda: parse_object(data))
    return Body({key: value for key, value in raw.items() if value is not None}, len(data))


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do ``work`` here if it is small, and on a thread if it would hold up other requests."""
    return work() if size < LONG_WORK_BYTES else await asyncio.to_thread(work)


def parse_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object; errors as for ``read_body``."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise RequestError("body", "is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _json_error(data, str(error)) from None
    if not isinstance(value, dict):
        raise RequestError("body", f"must be a JSON object, not {_kind(value)}")
    return cast(dict[str, Any], value)


def _check_content_type(request: HttpRequest) -> None:
    given = request.headers.get("content-type", "application/json")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(
            415,
            f"the content type is {given!r}; send JSON with 'Content-Type: application/json'",
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise HttpError(
            415,
            f"the content encoding is {encoding!r}; send the body as it is",
            code="unsupported_media_type",
        )


async def _read(request: HttpRequest, max_bytes: int) -> bytes:
    """Read the body, and stop as soon as it is too long."""
    too_long = HttpError(
        413, f"the body is longer than {max_bytes} bytes; send less", code="body_too_large"
    )
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > max_bytes:
        raise too_long
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise too_long
        parts.append(part)
    return b"".join(parts)


def _json_error(data: bytes, message: str) -> RequestError:
    """Say which field holds what is no JSON, where a more tolerant reader can tell."""
    if len(data) > SEARCHED_BYTES:
        return RequestError("body", f"is not JSON: {_plain(message)}")
    try:
        value = json.loads(data, parse_int=_integer)
    except (ValueError, RecursionError):
        return RequestError("body", f"is not JSON: {_plain(message)}")
    for path, item in _items("", value):
        if isinstance(item, float) and not math.isfinite(item):
            return RequestError(path, "is not a finite number that JSON can carry")
        if isinstance(item, str) and _is_broken(item):
            return RequestError(path, "is not valid Unicode: it has a lone surrogate")
    return RequestError("body", f"is not JSON: {_plain(message)}")


def _integer(digits: str) -> float | int:
    return int(digits) if len(digits) < 400 else math.inf


def _items(path: str, value: object) -> list[tuple[str, object]]:
    """Return each value below ``value`` with its path, keys included as values."""
    found: list[tuple[str, object]] = []
    stack: list[tuple[str, object]] = [(path, value)]
    while stack:
        path, value = stack.pop()
        found.append((path or "body", value))
        if isinstance(value, dict):
            for key, item in cast(dict[str, object], value).items():
                found.append((path or "body", key))
                stack.append((f"{path}.{key}" if path else key, item))
        elif isinstance(value, list):
            stack += [(f"{path}[{i}]", item) for i, item in enumerate(cast(list[object], value))]
    return found


def _is_broken(text: str) -> bool:
    return re.search("[\ud800-\udfff]", text) is not None


def _plain(message: str) -> str:
    return message.removeprefix("JSON is malformed: ").partition(" - at")[0]


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
