"""An index through any layout, against loops over tokens; and what does not fit is refused."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dovetail.replay.errors import ReplayError
from dovetail.replay.layout import (
    context_slice,
    micro_batches,
    pack,
    pad_left,
    pad_right,
    sequence_slice,
)
from dovetail.replay.packing import RouteBatch, TokenTable, route_dtype
from dovetail.replay.records import RouteTrace, TraceError

LAYERS, K, NUM_EXPERTS = (1, 2, 5), 2, 8
Cell = tuple[int, int] | None  # sequence and position; None is a pad


def some_trace(token_ids: list[int], seed: int, *, start: int = 0, num_experts: int = NUM_EXPERTS):
    rng = np.random.default_rng(seed)
    rows = max(len(token_ids) - 1 - start, 0)
    ids = rng.random((rows, len(LAYERS), num_experts)).argsort(axis=-1)[..., :K]
    return RouteTrace.of_tokens(
        ids, token_ids, layer_ids=LAYERS, num_experts=num_experts, start=start
    )


def some_sequences(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, 90, size=length).tolist() for length in lengths]


# -- layouts, cell by cell -----------------------------------------------------------------------


def cells_padded(lengths: dict[int, int], *, left: bool) -> list[list[Cell]]:
    width = max(lengths.values())
    rows: list[list[Cell]] = []
    for number, length in lengths.items():
        real: list[Cell] = [(number, position) for position in range(length)]
        pads: list[Cell] = [None] * (width - length)
        rows.append(pads + real if left else real + pads)
    return rows


def cells_packed(lengths: dict[int, int], multiple_of: int) -> list[list[Cell]]:
    row: list[Cell] = []
    for number, length in lengths.items():
        for position in range(length):
            row.append((number, position))
    while len(row) % multiple_of:
        row.append(None)
    return [row]


@dataclass(frozen=True)
class Case:
    """Sequences, and the order and layout of a micro-batch of some of them."""

    lengths: list[int]
    chosen: list[int]
    layout: str


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(lengths))))
    count = draw(st.integers(1, len(lengths)))
    layout = draw(st.sampled_from(["left", "right", "pack"]))
    return Case(lengths, list(order[:count]), layout)


def arranged(case: Case, rows: list[Tensor], multiple_of: int) -> Tensor:
    if case.layout == "pack":
        return pack(rows, multiple_of=multiple_of)[0]
    return (pad_left if case.layout == "left" else pad_right)(rows)


@given(cases(), st.integers(1, 4))
def test_columns_follow_an_index_through_any_layout(case, multiple_of):
    sequences = some_sequences(case.lengths)
    traces = [some_trace(ids, seed) for seed, ids in enumerate(sequences)]
    table = TokenTable(sequences, traces)
    index = arranged(case, table.indices(case.chosen), multiple_of)
    chosen = {number: case.lengths[number] for number in case.chosen}
    cells = (
        cells_packed(chosen, multiple_of)
        if case.layout == "pack"
        else cells_padded(chosen, left=case.layout == "left")
    )
    tokens, after = table.tokens(index, fill=-7), table.next(index)
    targets = table.tokens(after, fill=-100)
    weights = table.column([torch.tensor(ids) * 0.5 for ids in sequences], index, fill=-1)
    routes = table.routes(index, input_ids=tokens)
    assert routes.num_tokens == index.numel() and routes.num_missing == 0
    assert [len(cells), len(cells[0])] == list(index.shape)
    for row, line in enumerate(cells):
        for column, cell in enumerate(line):
            flat = row * len(line) + column
            if cell is None:
                assert (tokens[row, column], targets[row, column]) == (-7, -100)
                assert weights[row, column] == -1 and not routes.has_row_N[flat]
                continue
            number, position = cell
            ids, is_last = sequences[number], position + 1 == len(sequences[number])
            assert tokens[row, column] == ids[position]
            assert weights[row, column] == ids[position] * 0.5
            assert targets[row, column] == (-100 if is_last else ids[position + 1])
            assert bool(routes.has_row_N[flat]) != is_last
            if not is_last:
                want = traces[number].ids[position].tolist()
                assert routes.ids_NLK[flat].tolist() == want


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(12, 20))
def test_micro_batches_have_each_sequence_once_and_room(lengths, max_tokens):
    groups = micro_batches(lengths, max_tokens=max_tokens)
    assert sorted(number for group in groups for number in group) == list(range(len(lengths)))
    sums = [sum(lengths[number] for number in group) for group in groups]
    assert max(sums) <= max_tokens
    # No two groups would fit into one: first fit leaves at most one half empty.
    assert sum(size * 2 <= max_tokens for size in sums) <= 1


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_sequence_slices_join_to_the_whole(size, per_rank, rows):
    values = torch.arange(rows * size * per_rank).view(rows, -1)
    parts = [sequence_slice(values, rank=rank, size=size) for rank in range(size)]
    for rank, part in enumerate(parts):
        for column in range(per_rank):
            assert torch.equal(part[:, column], values[:, rank * per_rank + column])


@given(st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_context_slices_take_an_early_and_a_late_chunk_of_each_sequence(size, chunk_lens):
    lengths = [2 * size * chunk_len for chunk_len in chunk_lens]
    rows = [torch.arange(length) + 100 * number for number, length in enumerate(lengths)]
    values, cu_seqlens = pack(rows)
    for rank in range(size):
        want: list[int] = []
        for number, chunk_len in enumerate(chunk_lens):
            for chunk in (rank, 2 * size - 1 - rank):
                for offset in range(chunk_len):
                    want.append(100 * number + chunk * chunk_len + offset)
        got = context_slice(values, rank=rank, size=size, cu_seqlens=cu_seqlens)
        assert got[0].tolist() == want
        if len(rows) == 1:
            assert torch.equal(context_slice(values, rank=rank, size=size), got)


def test_slices_of_an_index_are_slices_of_the_routes():
    sequences = some_sequences([8, 8])
    table = TokenTable(sequences, [some_trace(ids, at) for at, ids in enumerate(sequences)])
    index = pad_right(table.indices())
    whole = table.routes(index)
    for rank in range(2):
        mine = table.routes(context_slice(index, rank=rank, size=2))
        at = context_slice(torch.arange(16).view(2, 8), rank=rank, size=2).flatten()
        assert torch.equal(mine.ids_NLK, whole.ids_NLK[at])
    turned = table.routes(index.T)  # for a model that flattens sequence-major
    batch_major = whole.ids_NLK.view(2, 8, 3, K)
    assert torch.equal(turned.ids_NLK.view(8, 2, 3, K), batch_major.transpose(0, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pad_right([]), "there are no rows"),
        (lambda: pad_left([torch.arange(4)], width=3), "a row has 4 tokens; width is 3"),
        (lambda: pack([]), "there are no rows"),
        (lambda: micro_batches([3, 9], max_tokens=8), "sequence 1 has 9 tokens; max_tokens is 8"),
        (lambda: sequence_slice(torch.arange(7), rank=0, size=2), "7 columns do not divide into 2"),
        (lambda: context_slice(torch.arange(6), rank=0, size=2), "6 columns do not divide into 4"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [(255, torch.uint8), (256, torch.uint8), (257, torch.int16), (384, torch.int16)],
)
def test_ids_keep_their_value_at_any_width(num_experts, dtype):
    ids = list(range(40))
    trace = some_trace(ids, 1, num_experts=num_experts)
    routes = TokenTable([ids], [trace]).routes(torch.arange(40))
    assert routes.ids_NLK.dtype == dtype == route_dtype(num_experts)
    assert routes.ids_NLK[:-1].long().tolist() == trace.ids.astype(int).tolist()
    assert int(routes.ids_NLK.long().max()) > num_experts - 40


def test_a_missing_row_is_an_error_or_counted():
    sequences = some_sequences([4, 6])
    traces = [some_trace(sequences[0], 0), some_trace(sequences[1], 1, start=2)]
    table = TokenTable(sequences, traces)
    index = pad_right(table.indices())
    message = r"2 tokens have no row, the first at position 0 of sequence 1, .* has \[2, 5\)"
    with pytest.raises(ReplayError, match=message):
        table.routes(index)
    routes = table.routes(index, missing="live")
    assert routes.num_missing == 2 and int(routes.has_row_N.sum()) == 3 + 3
    assert table.routes(pad_right(table.indices([0]))).num_missing == 0
    for word in ("Live", None):  # a typo must not switch the check off
        with pytest.raises(ReplayError, match=r'missing is .*; give "error" or "live"'):
            table.routes(index, missing=word)


def test_tokens_and_traces_that_do_not_belong_together_are_refused():
    sequences = some_sequences([4, 6])
    traces = [some_trace(ids, at) for at, ids in enumerate(sequences)]
    with pytest.raises(TraceError, match=r"sequence 0: 4 tokens; the rows end at 5"):
        TokenTable(sequences, traces[::-1])
    with pytest.raises(TraceError, match=r"sequence 1: the tokens at .* are not those"):
        TokenTable([sequences[0], sequences[1][::-1]], traces)
    with pytest.raises(ReplayError, match="1 traces for 2 sequences"):
        TokenTable(sequences, traces[:1])
    with pytest.raises(TraceError, match="sequence 1: num_experts is 8, the trace's 9"):
        TokenTable(sequences, [traces[0], some_trace(sequences[1], 1, num_experts=9)])
    with pytest.raises(ReplayError, match=r'sequence 1 is None.* capture=\("experts",\)'):
        TokenTable(sequences, [traces[0], None])  # what generate returns if nobody asks
    with pytest.raises(ReplayError, match="the table has no traces"):
        TokenTable(sequences).routes(torch.arange(4))


def test_an_index_that_is_none_is_refused():
    sequences = some_sequences([4, 6])
    table = TokenTable(sequences, [some_trace(ids, at) for at, ids in enumerate(sequences)])
    with pytest.raises(ReplayError, match="not one of these 10 tokens"):
        table.routes(torch.tensor([3, 10]))
    tokens = table.tokens(torch.arange(4))
    tokens[2] += 1
    with pytest.raises(ReplayError, match="place 2 of input_ids is token"):
        table.routes(torch.arange(4), input_ids=tokens)
    with pytest.raises(ReplayError, match="input_ids is a list"):
        table.routes(torch.arange(4), input_ids=tokens.tolist())
    with pytest.raises(ReplayError, match="3 input_ids, an index of 4"):
        table.routes(torch.arange(4), input_ids=tokens[:3])
    with pytest.raises(ReplayError, match="9 values for 10 tokens"):
        table.column(torch.zeros(9), torch.arange(4))
    with pytest.raises(ReplayError, match=r"values of sequence 0 are a list; give torch\.tensor"):
        table.column([[0.0] * 4, [0.0] * 6], torch.arange(4))
    with pytest.raises(ReplayError, match="does not have each token once"):
        table.traces(table.routes(torch.arange(4)), torch.arange(4))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 1], "index is a list; give an int64 tensor"),
        (np.arange(2), "index is a ndarray"),
        (torch.zeros(2), "index is torch.float32"),
        (torch.ones(2, dtype=torch.bool), "index is torch.bool"),
        (torch.tensor([10]), "not one of these 10 tokens"),
        (torch.tensor([-2]), "not one of these 10 tokens"),
    ],
)
@pytest.mark.parametrize("ask", ["tokens", "next", "routes"])
def test_an_index_that_is_none_is_refused_by_all_who_take_one(ask, index, message):
    sequences = some_sequences([4, 6])
    table = TokenTable(sequences, [some_trace(ids, at) for at, ids in enumerate(sequences)])
    with pytest.raises(ReplayError, match=message):
        getattr(table, ask)(index)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids_NLK": torch.zeros(3, 3, 2, dtype=torch.int64)}, "8 experts need torch.uint8"),
        ({"ids_NLK": torch.zeros(3, 3, dtype=torch.uint8)}, "ids have 2 axes"),
        ({"has_row_N": torch.ones(2, dtype=torch.bool)}, r"give bool \[3\]"),
        ({"has_row_N": torch.ones(3)}, "has_row is torch.float32"),
        ({"layer_ids": (1, 2)}, "3 layers, layer_ids names 2"),
        ({"ids_NLK": torch.full((3, 3, 2), 8, dtype=torch.uint8)}, "ids go from 8 to 8"),
    ],
)
def test_a_batch_of_routes_that_does_not_hold_together_is_refused(change, message):
    fields = {
        "ids_NLK": torch.zeros(3, 3, 2, dtype=torch.uint8),
        "has_row_N": torch.ones(3, dtype=torch.bool),
        "layer_ids": LAYERS,
        "num_experts": NUM_EXPERTS,
    }
    RouteBatch(**fields)
    with pytest.raises(ReplayError, match=message):
        RouteBatch(**fields | change)


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 1), (2, 0, 2)])
def test_a_sequence_without_tokens_is_one_like_the_others(lengths):
    sequences = some_sequences(list(lengths))
    given = [some_trace(sequence, seed) for seed, sequence in enumerate(sequences)]
    table = TokenTable(sequences, given)
    index = pad_right(table.indices())
    got = table.traces(table.routes(index), index)
    assert [trace.num_rows for trace in got] == [max(n - 1, 0) for n in lengths]
    for mine, theirs in zip(got, given, strict=True):
        np.testing.assert_array_equal(mine.ids, theirs.ids)


def test_a_batch_of_pads_alone_needs_no_tokens():
    table = TokenTable([[]], [some_trace([], 0)])
    index = pad_right(table.indices(), width=2)
    assert table.tokens(index, fill=7).tolist() == [[7, 7]]
    assert table.next(index).tolist() == [[-1, -1]]
    assert table.routes(index).has_row_N.tolist() == [False, False]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([20, 7], r"sequence 0 have shape \[20\], but it has 7 tokens"),
        ([8, 19], r"sequence 0 have shape \[8\]"),
        ([7, 20, 0], "values of 3 sequences, not of 2"),
        ([27], "values of 1 sequences"),
    ],
)
def test_values_of_other_sequences_are_refused_though_their_sum_is_right(lengths, message):
    table = TokenTable(some_sequences([7, 20]))
    index = pad_right(table.indices())
    values = [torch.arange(7.0), torch.arange(20.0)]
    assert torch.equal(table.column(values, index)[0, :7], values[0])
    with pytest.raises(ReplayError, match=message):
        table.column([torch.zeros(length) for length in lengths], index)


def test_a_text_is_no_sequence():
    with pytest.raises(ReplayError, match="sequence 1 is text"):
        TokenTable([[1, 2], "KING HENRY"])
