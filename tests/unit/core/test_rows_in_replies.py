"""SGLang's rows in a reply: the same text, in however many pieces it is written."""

import base64
import json

import msgspec
import numpy as np
import pytest

from dovetail.core.routes import (
    PIECE,
    RoutesAsked,
    json_of,
    msgpack_of,
    routes_reply,
    sglang_rows,
)
from dovetail.replay.records import RouteTrace


def trace(num_rows: int, layer_ids: tuple[int, ...]) -> RouteTrace:
    ids = np.random.default_rng(num_rows).integers(0, 60, (num_rows, len(layer_ids), 2))
    token_ids = list(range(num_rows + 1))
    return RouteTrace.of_tokens(ids, token_ids, layer_ids=layer_ids, num_experts=60)


@pytest.mark.parametrize("num_bytes", [0, 12, PIECE - 12, PIECE, PIECE + 12, 3 * PIECE + 24])
def test_pieces_join_to_the_text(num_bytes: int) -> None:
    rows = np.arange(num_bytes // 4, dtype="<i4").reshape(-1, 3, 1)
    text = base64.b64encode(rows.tobytes()).decode()
    reply = {"a": rows, "b": ['"', rows, "\\"], "c": b"raw"}
    pieces = json_of(reply)
    assert json.loads(b"".join(pieces)) == {"a": text, "b": ['"', text, "\\"], "c": "cmF3"}
    assert max(map(len, pieces)) <= PIECE // 3 * 4
    assert all(pieces[:1]) and all(pieces[-1:])
    [packed] = msgpack_of(reply)
    assert msgspec.msgpack.decode(packed) == {"a": text, "b": ['"', text, "\\"], "c": b"raw"}


def test_a_reply_without_rows_is_one_piece() -> None:
    assert json_of({"text": "a"}) == [b'{"text":"a"}']


@pytest.mark.parametrize("layer_ids", [(0, 1, 2), (1, 2, 3), (0, 2, 4), (3,)])
def test_layers_are_where_the_model_has_them(layer_ids: tuple[int, ...]) -> None:
    made = trace(5, layer_ids)
    rows = sglang_rows(made, num_layers=5, total_len=6)
    assert rows.shape == (5, 5, 2) and rows.dtype == np.int32
    for layer in range(5):
        want = made.ids[:, layer_ids.index(layer)] if layer in layer_ids else 0
        assert (rows[:, layer] == want).all()
    assert len(sglang_rows(made, num_layers=5, total_len=5)) == 4


@pytest.mark.parametrize(("num_rows", "has_them"), [(0, False), (4, False), (5, True), (6, True)])
def test_clients_get_all_rows_or_none(num_rows: int, has_them: bool) -> None:
    """They know how many from the tokens; an abort in the prompt leaves fewer."""
    asked = RoutesAsked(sglang=True, own=True, num_layers=3)
    reply = routes_reply(asked, {}, trace(num_rows, (0, 1, 2)), start=0, total_len=6)
    assert "routes" in reply  # our own form says what it holds
    assert ("routed_experts" in reply) == ("routed_experts_start_len" in reply) == has_them
    if has_them:
        assert len(reply["routed_experts"]) == 5
