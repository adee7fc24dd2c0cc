"""``RouteTrace``: cut and joined it is the same, and whatever does not fit is refused by name."""

import base64
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.replay.records import (
    MAGIC,
    RouteTrace,
    TraceError,
    digest_of,
    from_sglang,
    from_vllm,
)
from dovetail.wire.capture import CaptureSpan, expert_dtype

LAYERS, K = (1, 2, 5), 2


def some_ids(num_rows: int, num_experts: int, seed: int = 0, num_layers: int = 3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((num_rows, num_layers, num_experts)).argsort(axis=-1)[..., :K]


def some_trace(num_rows: int = 9, num_experts: int = 8, start: int = 0, **fields) -> RouteTrace:
    return RouteTrace.of_tokens(
        some_ids(num_rows, num_experts, seed=start),
        tokens(start + num_rows),
        layer_ids=LAYERS,
        num_experts=num_experts,
        start=start,
        **fields,
    )


def tokens(count: int) -> list[int]:
    return [(7 * i * i + 3) % 1000 for i in range(count)]


def assert_equal(a: RouteTrace, b: RouteTrace) -> None:
    assert a.header == b.header
    np.testing.assert_array_equal(a.ids, b.ids)
    assert a.ids.dtype == b.ids.dtype


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, "uint8"), (255, "uint8"), (256, "uint16")])
def test_bytes_come_back(num_experts, dtype):
    trace = some_trace(num_experts=num_experts)
    assert trace.ids.dtype == dtype == expert_dtype(num_experts)
    assert_equal(RouteTrace.from_bytes(trace.to_bytes()), trace)
    assert trace.header.shape == (9, 3, 2)
    assert len(trace.to_bytes()) < 700 + trace.ids.nbytes


@given(st.integers(0, 12), st.data())
def test_what_is_cut_joins_to_the_whole(num_rows, data):
    spans = (CaptureSpan(start=4, end=4 + num_rows, epoch=3),) if num_rows else ()
    trace = some_trace(num_rows, start=4, spans=spans)
    ids = tokens(4 + num_rows)
    cuts = sorted(data.draw(st.lists(st.integers(4, 4 + num_rows), max_size=4)))
    borders = [4, *cuts, 4 + num_rows]
    parts = [trace.slice_tokens(a, b, ids) for a, b in pairwise(borders)]
    joined = RouteTrace.concat(parts, ids)
    np.testing.assert_array_equal(joined.ids, trace.ids)
    assert joined.token_digest == trace.token_digest and joined.start == trace.start
    assert {span.epoch for span in joined.spans} <= {3}
    joined.validate(ids, layer_ids=LAYERS, num_experts=8, num_experts_per_tok=K)


def test_the_rows_of_a_turn_begin_with_the_token_that_the_last_one_sampled():
    ids = tokens(20)
    whole = some_trace(19)
    first = whole.slice_tokens(0, 7, ids)  # 8 tokens, of which the last was no input
    assert_equal(
        RouteTrace.concat([first, whole.delta(8, ids)], ids).delta(20, ids), whole.delta(20, ids)
    )
    assert whole.delta(8, ids).start == 7


def test_a_cut_span_keeps_its_count_as_a_bound():
    spans = (
        CaptureSpan(start=0, end=6, epoch=0, num_recomputed=1, num_differing=4),
        CaptureSpan(start=6, end=9, epoch=1),
    )
    trace = some_trace(spans=spans)
    part = trace.slice_tokens(4, 8, tokens(9))
    assert part.spans == (
        CaptureSpan(start=4, end=6, epoch=0, num_recomputed=1, num_differing=2),
        CaptureSpan(start=6, end=8, epoch=1),
    )


def _with_header(trace: RouteTrace, header: bytes) -> bytes:
    """The trace's bytes with another header."""
    data = trace.to_bytes()
    return data[: len(MAGIC)] + len(header).to_bytes(8, "little") + header + data


def _spoilt(trace: RouteTrace, index: tuple[int, int, int], value: int) -> RouteTrace:
    ids = trace.ids.copy()
    ids[index] = value
    return RouteTrace(
        ids,
        *(
            getattr(trace, name)
            for name in ("layer_ids", "num_experts", "start", "spans", "token_digest")
        ),
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.validate(tokens(8)), r"8 tokens; the rows end at 9"),
        (lambda t: t.validate([1, *tokens(9)[1:]]), r"tokens at \[0, 9\) are not those"),
        (lambda t: t.validate(tokens(9), layer_ids=(1, 2, 4)), "MoE layers are"),
        (lambda t: t.validate(tokens(9), num_experts=9), "num_experts is 9"),
        (lambda t: t.validate(tokens(9), num_experts_per_tok=3), "num_experts_per_tok is 3"),
        (lambda t: _spoilt(t, (4, 1, 0), 8).validate(tokens(9)), "position 4, .* 1, .*0 to 7"),
        (
            lambda t: _spoilt(t, (5, 2, 0), t.ids[5, 2, 1]).validate(tokens(9)),
            "position 5, .* number 2, has twice one expert",
        ),
        (lambda t: t.slice_tokens(0, 10, tokens(10)), r"\[0, 10\) is not within"),
        (lambda t: RouteTrace.concat([t, t], tokens(9)), "ends at 9, the next begins at 0"),
        (lambda t: RouteTrace.concat([], []), "no parts"),
        (lambda t: RouteTrace.from_bytes(b"x" + t.to_bytes()), "no trace"),
        (lambda t: RouteTrace.from_bytes(t.to_bytes()[:-1]), "53 bytes of ids"),
        (lambda t: RouteTrace.from_bytes(t.to_bytes()[:26]), "header cannot be read|no trace"),
        (lambda t: RouteTrace.from_bytes(_with_header(t, b"[" * 10**5)), "header cannot be read"),
        (lambda t: RouteTrace.from_bytes(_with_header(t, b'{"dtype":"\xff"}')), "header cannot"),
        (lambda t: some_trace(spans=(CaptureSpan(start=0, end=8, epoch=0),)), "spans do not cover"),
        (lambda t: some_trace(spans=()), "spans do not cover"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(spoil, message):
    with pytest.raises(TraceError, match=message):
        spoil(some_trace())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ids": np.zeros((2, 3), np.uint8)}, "2 axes"),
        ({"ids": np.zeros((2, 3, 2), np.int32)}, "ids are int32; 8 experts need uint8"),
        ({"ids": np.zeros((2, 4, 2), np.uint8)}, "4 layers, layer_ids names 3"),
        ({"ids": np.zeros((3, 2, 2), np.uint8).transpose(1, 0, 2)}, "not in C order"),
        ({"layer_ids": (1, 5, 2)}, "do not ascend"),
        ({"start": -1}, "start is -1"),
        ({"token_digest": b"123"}, "another length"),
    ],
)
def test_a_trace_that_does_not_hold_together_is_none(fields, message):
    good = some_trace(2)
    names = ("ids", "layer_ids", "num_experts", "start", "spans", "token_digest")
    with pytest.raises(TraceError, match=message):
        RouteTrace(**{name: getattr(good, name) for name in names} | fields)


# -- other layouts ---------------------------------------------------------------------------


def all_layers(ids: np.ndarray, num_layers: int = 7) -> np.ndarray:
    rows = np.zeros((len(ids), num_layers, K), dtype=np.int32)
    rows[:, list(LAYERS)] = ids
    return rows


def read_sglang(rows: np.ndarray, num_tokens: int, **fields) -> RouteTrace:
    return from_sglang(
        base64.b64encode(rows.astype("<i4").tobytes()).decode(),
        tokens(num_tokens),
        **{"num_hidden_layers": 7, "layer_ids": LAYERS, "num_experts": 8, "num_experts_per_tok": K}
        | fields,
    )


@pytest.mark.parametrize("start", [0, 3, 9])
def test_sglang_rows(start):
    whole = some_trace(9)
    got = read_sglang(all_layers(whole.ids[start:]), 10, start=start)
    np.testing.assert_array_equal(got.ids, whole.ids[start:])
    assert got.start == start and got.layer_ids == LAYERS
    assert got.token_digest == digest_of(tokens(9)[start:])


def test_sglang_rows_that_are_too_few_or_of_other_layers():
    ids = some_trace(9).ids
    with pytest.raises(TraceError, match="9 rows of the model need 126"):
        read_sglang(all_layers(ids)[:-1], 10)
    with pytest.raises(TraceError, match="dense layer has experts"):
        read_sglang(all_layers(ids), 10, layer_ids=(1, 2, 4))
    with pytest.raises(TraceError, match="0 to 3"):
        read_sglang(all_layers(ids), 10, num_experts=4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("@@@", "no base64"),
        ("\u00e9AAA", "no base64"),
        ("AAAA", "3 bytes are no"),
        (None, "rows are None, not base64: .*aborted before its prompt"),
        ([], "rows are a list"),
    ],
)
def test_sglang_text_that_holds_no_ids(data, message):
    model = {"layer_ids": LAYERS, "num_experts": 8, "num_experts_per_tok": K}
    with pytest.raises(TraceError, match=message):
        from_sglang(data, tokens(10), num_hidden_layers=7, **model)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32"])
@pytest.mark.parametrize("as_text", [False, True])
def test_vllm_rows(dtype, as_text):
    rows = all_layers(some_trace(9).ids[2:]).astype(dtype)
    data = base64.b64encode(rows.tobytes()).decode() if as_text else rows.tobytes()
    value = {"data": data, "shape": list(rows.shape), "dtype": dtype, "start": 2}
    got = from_vllm(value, tokens(10), layer_ids=LAYERS, num_experts=8)
    np.testing.assert_array_equal(got.ids, some_trace(9).ids[2:])
    for missing in ("data", "shape", "dtype"):
        less = {name: part for name, part in value.items() if name != missing}
        with pytest.raises(TraceError, match=missing):
            from_vllm(less, tokens(10), layer_ids=LAYERS, num_experts=8)


@pytest.mark.parametrize("shape", [(-1, -1, 6), (2**32, 2**32, 0), (2**32, 2**32, 1)])
def test_shapes_that_are_none_are_refused(shape):
    trace = some_trace(1)
    data = b"" if max(shape) > 6 else trace.ids.tobytes()
    header = msgspec.structs.replace(trace.header, shape=shape)
    with pytest.raises(TraceError, match="shape"):
        RouteTrace.from_header(header, data)
    value = {"data": data, "shape": shape, "dtype": "uint8"}
    with pytest.raises(TraceError, match="shape"):
        from_vllm(value, tokens(2), layer_ids=LAYERS, num_experts=8)


@pytest.mark.parametrize("num_experts", [0, -1])
def test_a_model_without_experts_has_no_trace(num_experts):
    header = msgspec.structs.replace(some_trace(1).header, num_experts=num_experts)
    with pytest.raises(TraceError, match=f"num_experts is {num_experts}"):
        RouteTrace.from_header(header, some_trace(1).ids.tobytes())


def test_a_header_is_plain_json():
    header = msgspec.json.decode(msgspec.json.encode(some_trace(2).header))
    assert header == {
        "shape": [2, 3, 2],
        "dtype": "uint8",
        "start": 0,
        "layer_ids": [1, 2, 5],
        "num_experts": 8,
        "spans": [{"start": 0, "end": 2, "epoch": 0, "num_recomputed": 0, "num_differing": 0}],
        "token_digest": digest_of(tokens(2)).hex(),
    }
