"""``ReplaySession``: what it records and reports, and that rows follow their tokens."""

import pytest
import torch
from torch import Tensor, nn

from dovetail.replay.layout import micro_batches, pack, pad_left, pad_right
from dovetail.replay.packing import TokenTable
from dovetail.replay.session import ReplaySession
from tests.support.moe_families import VOCAB, tiny_model
from tests.support.replay import (
    IDS,
    assert_same,
    next_token_loss,
    outcome,
    random_routes,
    random_trace,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about its defaults

LENGTHS = (5, 9, 3, 7)


# -- recording -----------------------------------------------------------------------------------


def test_forwards_of_a_recording_follow_one_another(model, session):
    ids = IDS[:1]
    model.eval()
    with torch.no_grad(), session.record() as whole:
        model(input_ids=ids)
    with torch.no_grad(), session.record() as steps:
        cache = model(input_ids=ids[:, :4], use_cache=True).past_key_values
        for at in (4, 5):
            cache = model(
                input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True
            ).past_key_values
    model.train()
    assert torch.equal(whole.routes.ids_NLK, steps.routes.ids_NLK)


def test_a_recomputation_is_not_recorded(model, session):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with session.record() as recording:
        outcome(model, lambda: next_token_loss(model, IDS))
    assert recording.routes.num_tokens == IDS.numel()
    assert recording.calls.num_recomputes == [1, 1, 1]


# -- what is routed live -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_the_report_is_of_the_live_routers(name):
    """In the first layer with experts, hidden states are those of a native forward."""
    model = tiny_model(name)
    session = ReplaySession(model)
    routes = random_routes(session, IDS.numel())
    routes.has_row_N[3:5] = False
    with torch.no_grad():
        with session.record() as native:
            next_token_loss(model, IDS)
        with session.replay(routes) as replay:
            next_token_loss(model, IDS)
    report = replay.report()
    live, forced = native.routes.ids_NLK[:, 0].tolist(), routes.ids_NLK[:, 0].tolist()
    common = [len(set(a) & set(b)) for a, b in zip(live, forced, strict=True)]
    common[3] = common[4] = 4
    assert report.overlap_NL[:, 0].tolist() == common
    assert bool((report.margin_NL > 0).all())
    assert report.summary()["num_tokens"] == 10 and report.summary()["num_live"] == 2


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2"])
def test_tokens_without_a_row_are_routed_as_without_a_replay(name):
    model = tiny_model(name)
    session = ReplaySession(model)
    routes = random_routes(session, IDS.numel())
    routes.has_row_N[:] = False
    native = outcome(model, lambda: next_token_loss(model, IDS))
    with session.replay(routes):
        assert_same(native, outcome(model, lambda: next_token_loss(model, IDS)))


# -- rows follow their tokens --------------------------------------------------------------------


def some_sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def logprobs_alone(model: nn.Module, session: ReplaySession, table: TokenTable) -> list[Tensor]:
    """Each sequence in a forward of its own."""
    out: list[Tensor] = []
    for index in table.indices():
        ids = table.tokens(index)[None]
        with torch.no_grad(), session.replay(table.routes(index, input_ids=ids)):
            logits = model(input_ids=ids, use_cache=False).logits[0]
        out.append(logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    return out


def laid_out(layout: str, table: TokenTable) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Each micro-batch: its index, and what else the model is given."""
    if layout == "packed":
        groups = [table.indices(group) for group in micro_batches(LENGTHS, max_tokens=14)]
        packed = [(pack(group)[0], group) for group in reversed(groups)]
        return [
            (index, {"position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None]})
            for index, rows in packed
        ]
    pad = pad_left if layout == "left" else pad_right
    batches = [pad(table.indices(group)) for group in ([3, 1], [0, 2])]
    return [
        (
            index,
            {
                "attention_mask": (index >= 0).long(),
                "position_ids": ((index >= 0).long().cumsum(1) - 1).clamp(min=0),
            },
        )
        for index in batches
    ]


@pytest.mark.parametrize("layout", ["left", "right", "packed"])
def test_rows_follow_their_tokens_through_layouts(model, session, layout):
    sequences = some_sequences()
    traces = [random_trace(ids, session, seed=at) for at, ids in enumerate(sequences)]
    table = TokenTable(sequences, traces)
    alone = torch.cat(logprobs_alone(model, session, table))
    found = torch.full((len(table.tokens_T),), torch.nan)
    for index, inputs in laid_out(layout, table):
        ids = table.tokens(index)
        after = table.next(index)
        with torch.no_grad(), session.replay(table.routes(index, input_ids=ids)):
            logits = model(input_ids=ids, use_cache=False, **inputs).logits
        targets = table.tokens(after)
        logprobs = logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
        found[index[after >= 0]] = logprobs[after >= 0]
    found = found[~found.isnan()]
    torch.testing.assert_close(found, alone, atol=2e-5, rtol=1e-4)


def test_what_a_trainer_records_comes_back_as_traces(model, session):
    sequences = some_sequences()
    table = TokenTable(sequences)
    index = pad_left(table.indices())
    inputs = {"attention_mask": (index >= 0).long()}
    with session.record() as recording:
        native = outcome(
            model,
            lambda: model(input_ids=table.tokens(index), **inputs).logits[index >= 0].sum(),
        )
    traces = table.traces(recording.routes, index)
    for ids, trace in zip(sequences, traces, strict=True):
        trace.validate(ids, layer_ids=(0, 1, 2), num_experts=16, num_experts_per_tok=4)
        assert trace.num_rows == len(ids) - 1
    again = TokenTable(sequences, traces)
    with session.replay(again.routes(index)) as replay:
        replayed = outcome(
            model,
            lambda: model(input_ids=table.tokens(index), **inputs).logits[index >= 0].sum(),
        )
    assert_same(native, replayed)
    assert replay.report().summary()["coverage"] == 1
