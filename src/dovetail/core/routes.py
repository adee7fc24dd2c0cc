"""Captured columns in replies: SGLang's form of expert rows, and our own.

Owns both shapes, as pure functions of rows. Ours says what it holds, and takes a byte or two an id;
SGLang's is int32 over all layers, its shape and start known to the client alone.
"""

import base64
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dovetail.replay.records import RouteTrace
from dovetail.wire.capture import RowTransport

PIECE = 3 * 2**18
"""Bytes of rows that become base64 in one go; a multiple of 3, so that what comes out joins."""

Pieces = list[bytes]
"""A reply, one piece behind the other."""

Columns = Mapping[str, NDArray[np.generic]]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the columns of a reply have been put.

    Attributes:
        transport: how they come to the client.
        offsets: where each begins in the client's file; empty if they are in the reply.
    """

    transport: RowTransport
    offsets: dict[str, int]


class RoutesAsked(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply is to hold of the captured columns.

    Attributes:
        sglang: ``routed_experts``, in the last event of a stream.
        own: ``captured``, the rows that are new in this reply, and in the last one ``routes``.
        num_layers: of the model, dense ones included.
        start_len: position of the first row that was asked for.
        place: puts the columns of our own form elsewhere; None leaves them in the reply.
    """

    sglang: bool
    own: bool
    num_layers: int
    start_len: int = 0
    place: Callable[[Columns], Placement] | None = None


def sglang_rows(routes: RouteTrace, *, num_layers: int, total_len: int) -> NDArray[np.int32] | None:
    """Return rows in SGLang's form, int32 [rows, layers, k], for ``json_of`` and ``msgpack_of``.

    Dense layers hold 0, as they do there and nowhere else. There is a row for each position from
    the trace's start to ``total_len - 2``: the last token's is left out even where nothing was
    sampled and it was an input. Clients know the shape from the number of tokens alone, so what was
    aborted before all of its prompt was computed has none: that is None.

    Args:
        routes: the rows.
        num_layers: of the model, dense ones included.
        total_len: tokens of prompt and output.
    """
    num_rows = max(total_len - 1 - routes.start, 0)
    if routes.num_rows < num_rows:
        return None
    rows = np.zeros((num_rows, num_layers, routes.num_experts_per_tok), dtype="<i4")
    layers: list[int] | slice = list(routes.layer_ids)
    if layers == list(range(layers[0], layers[-1] + 1)):
        layers = slice(layers[0], layers[-1] + 1)  # a fifth of the time of a list
    rows[:, layers] = routes.ids[:num_rows]
    return rows


def _base64_of(rows: NDArray[np.int32]) -> str:
    """Return SGLang's rows as text, which they are in msgpack too."""
    return base64.b64encode(_view(rows)).decode("ascii")


def _view(rows: NDArray[np.generic]) -> memoryview:
    """Return the bytes of an array, without a copy if it is in C order."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


def json_of(value: object) -> Pieces:
    """Return a reply as JSON, with SGLang's rows in it as base64.

    An encoder that met all rows at once would keep the interpreter's lock for them, and with it the
    server's event loop; and whoever joined them would copy them once more.
    """
    arrays: list[NDArray[np.int32]] = []
    mark = secrets.token_hex(16)  # no text of a client's has it

    def marked(rows: NDArray[np.int32]) -> str:
        arrays.append(rows)
        return mark

    parts = msgspec.json.encode(value, enc_hook=marked).split(f'"{mark}"'.encode())
    pieces = [parts[0]]
    for rows, after in zip(arrays, parts[1:], strict=True):
        view = _view(rows)
        pieces.append(b'"')
        pieces += [base64.b64encode(view[i : i + PIECE]) for i in range(0, len(view), PIECE)]
        pieces += [b'"', after]
    return pieces


def msgpack_of(value: object) -> Pieces:
    """Return a reply as msgpack, with SGLang's rows in it as text, and rows of our own as bytes."""
    return [msgspec.msgpack.encode(value, enc_hook=_base64_of)]


def own_rows(
    columns: Columns, *, start: int, offsets: Mapping[str, int] | None = None
) -> dict[str, dict[str, Any]]:
    """Return columns whose first row is of position ``start``; ``data`` is bytes.

    In JSON bytes are base64, in msgpack they are what they are. A column that has an offset is in
    the client's file, and here has ``offset`` and ``nbytes`` instead of ``data``.
    """
    reply: dict[str, dict[str, Any]] = {}
    for name, rows in columns.items():
        head = {"start": start, "dtype": rows.dtype.name, "shape": list(rows.shape)}
        if offsets:
            reply[name] = head | {"offset": offsets[name], "nbytes": rows.nbytes}
        else:
            reply[name] = head | {"data": _view(rows)}
    return reply


def routes_reply(
    asked: RoutesAsked | None,
    columns: Columns,
    routes: RouteTrace | None,
    *,
    start: int,
    total_len: int,
) -> dict[str, Any]:
    """Return what a reply's ``meta_info`` has of captured columns.

    Args:
        asked: None for nothing.
        columns: the rows that are new in this reply.
        routes: all expert rows, in the last reply of a generation; None before, or without.
        start: position of the first new row.
        total_len: tokens of prompt and output so far.
    """
    reply: dict[str, Any] = {}
    if asked is None:
        return reply
    if asked.sglang and routes is not None:
        rows = sglang_rows(routes, num_layers=asked.num_layers, total_len=total_len)
        if rows is not None:
            reply |= {"routed_experts": rows, "routed_experts_start_len": routes.start}
    if asked.own and columns:
        placement = None if asked.place is None else asked.place(columns)
        offsets = None if placement is None else placement.offsets
        reply["captured"] = own_rows(columns, start=start, offsets=offsets)
        if placement is not None:
            reply["capture_transport"] = placement.transport
    if asked.own and routes is not None:
        reply["routes"] = routes.header
    return reply
