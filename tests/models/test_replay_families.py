"""Replay in the families of transformers: own routes change no bit, foreign ones are used."""

import pytest
import torch
from torch import Tensor, nn

from dovetail.replay.session import ReplaySession
from tests.support.moe_families import FAMILIES, VOCAB, tiny_model, watched_experts
from tests.support.replay import assert_same, next_token_loss, outcome, random_routes

# One of each recipe: renormalised softmax; logits, then softmax; sigmoid with bias and groups;
# softmax with groups and masked scores; an argument of forward as bias; scattered to dense; two
# routers a layer; a selection in another module than the scores.
SAMPLE = {
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v2",
    "minimax_m2",
    "llama4_text",
    "jetmoe",
    "dbrx",
}
REENTRANT = {"none": None, "reentrant": True, "non-reentrant": False}

families = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full) for name in FAMILIES],
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about its defaults


def some_ids(num_rows: int = 2, num_tokens: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCAB, (num_rows, num_tokens), generator=generator)


def router_grads(
    session: ReplaySession, model: nn.Module, grads: dict[str, Tensor]
) -> dict[str, float]:
    """The largest gradient among the parameters of each router."""
    largest: dict[str, float] = {}
    for router in session.routers:
        # Where another module computes the scores, the selection is in the block around it.
        inner = f"{router.name}.router." if f"{router.name}.router.layer.weight" in grads else ""
        prefix = inner or f"{router.name}."
        mine = [g.abs().max().item() for name, g in grads.items() if name.startswith(prefix)]
        largest[router.name] = max(mine)
    return largest


def checkpointed(model: nn.Module, use_reentrant: bool | None) -> None:
    if use_reentrant is None:
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})


@families
def test_own_routes_change_no_bit(name):
    model = tiny_model(name)
    session = ReplaySession(model)
    ids = some_ids()
    with session.record() as recording:
        native = outcome(model, lambda: next_token_loss(model, ids))
    routes = recording.routes
    with session.replay(routes) as replay:
        replayed = outcome(model, lambda: next_token_loss(model, ids))
    assert_same(native, replayed)
    assert replay.report().summary()["router_diff"] == 0
    assert min(router_grads(session, model, native[1]).values()) > 0


@families
def test_foreign_routes_reach_the_experts_with_weights(name):
    model, family = tiny_model(name), FAMILIES[name]
    session = ReplaySession(model)
    ids = some_ids()
    routes = random_routes(session, ids.numel())
    native = outcome(model, lambda: next_token_loss(model, ids))
    with session.replay(routes) as replay:
        replayed = outcome(model, lambda: next_token_loss(model, ids))
    assert not torch.equal(native[0], replayed[0])
    assert replay.report().summary()["router_diff"] > 0.9
    assert min(router_grads(session, model, replayed[1]).values()) > 0
    if family.hides_experts:
        return
    with watched_experts(model) as seen, session.replay(routes), torch.no_grad():
        next_token_loss(model, ids)
    seen = seen[-len(session.routers) :]  # layers that a table routes are before the others
    for place, (used, weights) in enumerate(seen):
        assert torch.equal(used, routes.ids_NLK[:, place].long())
        assert bool((weights != 0).all())


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_other_code_of_the_experts_changes_nothing(name, experts):
    model = tiny_model(name)
    assert model.get_experts_implementation()[""] == "grouped_mm"  # what the other tests run
    model.set_experts_implementation(experts)
    session = ReplaySession(model)
    ids = some_ids()
    with session.record() as recording:
        native = outcome(model, lambda: next_token_loss(model, ids))
    with session.replay(recording.routes):
        assert_same(native, outcome(model, lambda: next_token_loss(model, ids)))
    routes = random_routes(session, ids.numel())
    with session.replay(routes):
        plain = outcome(model, lambda: next_token_loss(model, ids))
    for mode in ("reentrant", "non-reentrant"):
        checkpointed(model, REENTRANT[mode])
        with session.replay(routes):
            assert_same(plain, outcome(model, lambda: next_token_loss(model, ids)))


@families
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_checkpointing_is_exact(name, mode):
    model = tiny_model(name)
    if not model.supports_gradient_checkpointing:
        pytest.skip("transformers has no checkpointing for it")
    session = ReplaySession(model)
    ids = some_ids()
    routes = random_routes(session, ids.numel())
    with session.replay(routes):
        plain = outcome(model, lambda: next_token_loss(model, ids))
    checkpointed(model, REENTRANT[mode])
    with session.replay(routes) as replay:
        again = outcome(model, lambda: next_token_loss(model, ids))
    assert_same(plain, again)
    assert replay.calls.num_recomputes == [1] * len(session.routers)
