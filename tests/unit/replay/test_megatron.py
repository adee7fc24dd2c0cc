"""Rows reach the right router, in the right micro-batch, in forward and in recomputation."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from dovetail.replay.errors import ReplayError
from dovetail.replay.layout import context_slice, pad_right, sequence_slice
from dovetail.replay.megatron import MegatronReplay, filled
from dovetail.replay.packing import RouteBatch, TokenTable
from dovetail.replay.records import RouteTrace
from tests.support.megatron import NUM_EXPERTS, WIDTH, Action, FakeChunk, FakeRouter, K

LAYERS = (1, 3, 4)  # decoder indices with experts; Megatron's numbers are one more
N = 6


def some_routes(
    seed: int, *, num_tokens: int = N, layer_ids: tuple[int, ...] = LAYERS
) -> RouteBatch:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_tokens, len(layer_ids), NUM_EXPERTS, generator=generator).argsort(-1)
    return RouteBatch(
        order[..., :K].to(torch.uint8),
        torch.ones(num_tokens, dtype=torch.bool),
        layer_ids,
        NUM_EXPERTS,
    )


def some_hidden(seed: int, num_tokens: int = N) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    hidden = torch.randn(num_tokens, 1, WIDTH, generator=generator)  # [sequence, batch, width]
    return hidden.requires_grad_()


def rows_of(routes: RouteBatch, layer_id: int) -> Tensor:
    return routes.ids_NLK[:, routes.layer_ids.index(layer_id)].long()


def assert_native(chunk: nn.Module) -> None:
    for module in chunk.modules():
        if isinstance(module, FakeRouter):
            replay = module.router_replay
            assert (replay.action, replay.target, replay.replay_backward_list) == (None, None, [])
            assert not module._forward_pre_hooks


@pytest.fixture(params=[False, True], ids=["plain", "recomputed"])
def chunk(request) -> FakeChunk:
    return FakeChunk([layer + 1 for layer in LAYERS], recompute=request.param)


def test_rows_of_a_layer_go_to_the_router_of_its_number(chunk):
    replay = MegatronReplay(chunk, Action)
    assert replay.layer_ids == LAYERS
    routes = some_routes(0)
    with replay.step():
        with replay.forward(routes):
            out = chunk(some_hidden(0))
        out.sum().backward()
    for router in chunk.routers():
        want = rows_of(routes, router.layer_number - 1)
        seen = router.selected
        assert seen[0][0] is Action.REPLAY_FORWARD and torch.equal(seen[0][1], want)
        assert seen[0][1].dtype == torch.int64
        again = [Action.REPLAY_BACKWARD] if chunk.recompute else []
        assert [action for action, _ in seen[1:]] == again
        assert all(torch.equal(ids, want) for _, ids in seen)
    assert_native(chunk)


@pytest.mark.parametrize(
    "schedule", ["F0 B0 F1 B1 F2 B2", "F0 F1 B0 F2 B1 B2", "F0 F1 F2 B0 B1 B2", "F0 E9 F1 B0 E9 B1"]
)
def test_micro_batches_keep_their_rows_in_any_pipeline_order(chunk, schedule):
    """F forward, B backward, E a forward without a backward, such as an evaluation."""
    replay = MegatronReplay(chunk, Action)
    outputs: dict[str, Tensor] = {}
    with replay.step():
        for item in schedule.split():
            kind, number = item[0], item[1]
            for router in chunk.routers():
                router.selected.clear()
            if kind == "B":
                outputs[number].sum().backward()
            else:
                with torch.set_grad_enabled(kind == "F"), replay.forward(some_routes(int(number))):
                    outputs[number] = chunk(some_hidden(int(number)))
            for router in chunk.routers():
                want = rows_of(some_routes(int(number)), router.layer_number - 1)
                calls = 1 if kind != "B" or chunk.recompute else 0
                assert len(router.selected) == calls
                assert all(torch.equal(ids, want) for _, ids in router.selected)
    assert_native(chunk)


def test_chunks_of_an_interleaved_pipeline_have_their_own_layers():
    chunks = [FakeChunk([2], recompute=True), FakeChunk([4, 5], recompute=True)]
    replay = MegatronReplay(chunks, Action)
    routes = [some_routes(0), some_routes(1)]
    with replay.step():
        outputs = []
        for chunk in chunks:
            for number in range(2):
                with replay.forward(routes[number], chunk):
                    outputs.append((chunk, number, chunk(some_hidden(number))))
        for chunk, number, out in (outputs[2], outputs[3], outputs[0], outputs[1]):
            for router in chunk.routers():
                router.selected.clear()
            out.sum().backward()
            for router in chunk.routers():
                [(_, ids)] = router.selected
                assert torch.equal(ids, rows_of(routes[number], router.layer_number - 1))


def test_a_later_stage_takes_its_layers_from_the_whole(chunk):
    stage = FakeChunk([5])
    replay = MegatronReplay(stage, Action)
    routes = some_routes(0)
    with replay.step(), torch.no_grad(), replay.forward(routes):
        stage(some_hidden(0))
    [(_, ids)] = stage.routers()[0].selected
    assert torch.equal(ids, rows_of(routes, 4))


def test_other_models_and_prediction_layers_route_natively(chunk):
    reference = FakeChunk([2, 4, 5])
    chunk.mtp = FakeChunk([6])
    replay = MegatronReplay(chunk, Action)
    assert replay.layer_ids == LAYERS
    with replay.step(), torch.no_grad(), replay.forward(some_routes(0)):
        reference(some_hidden(0))
        chunk.mtp(some_hidden(0))
        chunk(some_hidden(0))
    for router in (*reference.routers(), *chunk.mtp.routers()):
        assert [action for action, _ in router.selected] == [None]


def test_an_index_through_megatrons_slices_gives_a_rank_its_rows():
    """Two sequences of 8 columns; context parallel 2, sequence parallel 2, sequence-major."""
    sequences = [list(range(8)), list(range(10, 15))]
    rows = [torch.arange(len(ids) - 1)[:, None, None] for ids in sequences]
    traces = [
        RouteTrace.of_tokens(
            (number + at + torch.arange(K)).numpy() % NUM_EXPERTS,
            ids,
            layer_ids=(0,),
            num_experts=NUM_EXPERTS,
        )
        for number, (ids, at) in enumerate(zip(sequences, rows, strict=True))
    ]
    table = TokenTable(sequences, traces)
    index_BS = pad_right(table.indices())
    seen: dict[tuple[int, int], list[int]] = {}
    for context_rank in range(2):
        of_rank = context_slice(index_BS, rank=context_rank, size=2)
        for tensor_rank in range(2):
            part_BS = sequence_slice(of_rank, rank=tensor_rank, size=2)
            part_SB = part_BS.T.contiguous()  # the order of [sequence, batch, width]
            routes = table.routes(part_SB)
            for place, token in enumerate(part_SB.flatten().tolist()):
                if bool(routes.has_row_N[place]):
                    number = int(table.sequence_T[token])
                    position = token - table.begins[number]
                    seen[number, position] = routes.ids_NLK[place, 0].tolist()
    assert seen == {
        (number, position): trace.ids[position, 0].tolist()
        for number, trace in enumerate(traces)
        for position in range(trace.num_rows)
    }


def test_fillers_are_legal_distinct_and_spread():
    routes = some_routes(0, num_tokens=12)
    routes.has_row_N[2:10] = False
    ids = filled(routes)
    assert torch.equal(ids[:2], routes.ids_NLK[:2].long())
    assert torch.equal(ids[10:], routes.ids_NLK[10:].long())
    fillers = ids[2:10, 0]
    assert all(len(set(row)) == K for row in fillers.tolist())
    assert fillers.flatten().bincount(minlength=NUM_EXPERTS).tolist() == [2] * NUM_EXPERTS


def test_backwards_in_another_order_are_found_where_lengths_differ():
    chunk = FakeChunk([2, 4, 5], recompute=True)
    replay = MegatronReplay(chunk, Action)
    message = "was given 4 tokens, the routes have 6"
    with pytest.raises(ReplayError, match=message), replay.step():
        outputs = []
        for number, num_tokens in enumerate((6, 4)):
            with replay.forward(some_routes(number, num_tokens=num_tokens)):
                outputs.append(chunk(some_hidden(number, num_tokens)))
        outputs[1].sum().backward()
    assert_native(chunk)


# -- what is refused -----------------------------------------------------------------------------


def test_a_model_that_cannot_replay_is_refused():
    with pytest.raises(ReplayError, match="no router has a router_replay"):
        MegatronReplay(nn.Linear(2, 2), Action)
    chunk = FakeChunk([2, 4])
    chunk.layers[1].router.router_replay = None
    with pytest.raises(ReplayError, match=r"layers\.1\.router has no RouterReplay"):
        MegatronReplay(chunk, Action)
    chunk.layers[1].router = FakeRouter(4, fusion=True)
    with pytest.raises(ReplayError, match=r"moe_router_fusion is on in layers\.1\.router"):
        MegatronReplay(chunk, Action)
    chunk.layers[1].router = FakeRouter(None)
    with pytest.raises(ReplayError, match="layer_number None"):
        MegatronReplay(chunk, Action)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (some_routes(0, layer_ids=(1, 3, 5)), r"no rows for the layers \[4\] of this rank"),
        (None, "routes is None; give the RouteBatch"),
        (some_routes(0, num_tokens=5), r"was given 6 tokens, the routes have 5"),
    ],
)
def test_routes_that_do_not_fit_are_refused(chunk, routes, message):
    replay = MegatronReplay(chunk, Action)
    with pytest.raises(ReplayError, match=message), replay.step(), replay.forward(routes):
        chunk(some_hidden(0))
    assert_native(chunk)


def test_missing_rows_are_refused(chunk):
    routes = some_routes(0)
    lacking = RouteBatch(routes.ids_NLK, routes.has_row_N, LAYERS, NUM_EXPERTS, num_missing=2)
    replay = MegatronReplay(chunk, Action)
    message = "2 tokens have no row"
    with pytest.raises(ReplayError, match=message), replay.step(), replay.forward(lacking):
        pass


def test_calls_that_nobody_speaks_for_are_errors(chunk):
    replay, routes = MegatronReplay(chunk, Action), some_routes(0)
    with pytest.raises(ReplayError, match=r"inside step\(\) but outside of forward"), replay.step():
        chunk(some_hidden(0))
    with pytest.raises(ReplayError, match="a forward belongs inside step"), replay.forward(routes):
        pass
    with pytest.raises(ReplayError, match="a step is open"), replay.step(), replay.step():
        pass
    assert_native(chunk)


def test_a_copy_made_inside_a_step_is_an_error(chunk):
    replay = MegatronReplay(chunk, Action)
    with replay.step():
        for copy_of in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ReplayError, match="copied or pickled while a context is open"):
                copy_of(chunk)
    assert_native(copy.deepcopy(chunk))


@pytest.mark.parametrize("times", [0, 2])
def test_a_forward_that_runs_a_router_not_once_is_an_error(chunk, times):
    replay, routes = MegatronReplay(chunk, Action), some_routes(0)
    message = rf"layers\.0\.router ran {times} times"
    with pytest.raises(ReplayError, match=message), replay.step(), replay.forward(routes):
        for _ in range(times):
            chunk(some_hidden(0))
    assert_native(chunk)


def test_a_backward_that_is_missing_is_an_error():
    chunk = FakeChunk([2, 4, 5], recompute=True)
    replay = MegatronReplay(chunk, Action)
    message = "2 forwards and 1 recomputations, and 1 rows are left"
    with pytest.raises(ReplayError, match=message), replay.step():
        for number in range(2):
            with replay.forward(some_routes(number)):
                out = chunk(some_hidden(number))
        out.sum().backward()
    assert_native(chunk)
