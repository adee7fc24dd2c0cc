"""Lines of a prompt file: bodies of ``/generate``, read by the very rules of the server.

Owns what a line may leave open, and the fields that make sense over HTTP alone.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from dovetail.core.prompts import RequestMaker
from dovetail.errors import RequestError
from dovetail.server.native_body import (
    UNSUPPORTED,
    Call,
    GenerateFields,
    read_call,
    requests_of,
)
from dovetail.wire.request import Request

OF_HTTP = {
    "stream": "a reply is one line; leave it out",
    "capture_file": "rows come in the reply's line; leave it out",
}
"""Fields that a line cannot have, and why."""


def read_line(line: Mapping[str, Any], *, sampling: dict[str, Any], others: dict[str, Any]) -> Call:
    """Return what a line asks for. Unlike over HTTP, an unknown field is an error.

    Args:
        line: a body of ``/generate``; null means default.
        sampling: sampling parameters that it may leave open.
        others: other fields that it may leave open; ``return_logprob`` is true.

    Raises:
        RequestError: names the field.
    """
    raw = {"return_logprob": True, **others, **line}
    if line.get("return_routed_experts") and "capture" not in line:
        raw["capture"] = None  # they are the same rows
    raw = {name: value for name, value in raw.items() if value is not None}
    for name, value in raw.items():
        if name not in GenerateFields.__struct_fields__ and name not in UNSUPPORTED:
            raise RequestError(name, "is no field of a /generate body; correct its name")
        if name in OF_HTTP and value:
            raise RequestError(name, OF_HTTP[name])
    raw["sampling_params"] = _filled(raw.get("sampling_params"), sampling)
    return read_call(raw, max_prompts=sys.maxsize)


def _filled(given: Any, sampling: dict[str, Any]) -> Any:
    """Fill in what parameters leave open, of each item of a batch; of a wrong type stay as is."""
    if isinstance(given, list):
        return [_filled(one, sampling) for one in cast(list[Any], given)]
    return sampling | given if isinstance(given, dict) else sampling if given is None else given


class PromptFile:
    """The calls of a JSONL file, by line.

    Args:
        path: the file.
        sampling, others: see ``read_line``.

    Raises:
        RequestError: names the line and the field.
    """

    def __init__(self, path: Path, *, sampling: dict[str, Any], others: dict[str, Any]) -> None:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise RequestError("--prompts", f"cannot read {path}: {error.strerror}") from None
        self._path = path
        self.calls: dict[int, Call] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                body = msgspec.json.decode(line, type=dict[str, Any])
                body.setdefault("rid", str(len(self.calls)))
                self.calls[number] = read_line(body, sampling=sampling, others=others)
            except (msgspec.DecodeError, RecursionError, RequestError) as error:
                raise self._error(number, error) from None
        if not self.calls:
            raise RequestError("--prompts", f"{path} holds no request")

    def requests(self, maker: RequestMaker) -> list[tuple[Call, list[Request]]]:
        """Return the requests of each line; nothing is returned unless all are right."""
        made: list[tuple[Call, list[Request]]] = []
        for number, call in self.calls.items():
            try:
                made.append((call, requests_of(call, maker)))
            except RequestError as error:
                raise self._error(number, error) from None
        return made

    def _error(self, number: int, error: Exception) -> RequestError:
        return RequestError(f"{self._path} line {number}", str(error))
