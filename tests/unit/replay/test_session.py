"""``ReplaySession``: what it refuses, and what it leaves behind."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from dovetail.replay.errors import ReplayError
from dovetail.replay.packing import RouteBatch
from dovetail.replay.session import ReplaySession
from tests.support.moe_families import tiny_model
from tests.support.replay import IDS, assert_same, next_token_loss, outcome, random_routes

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about its defaults


@pytest.fixture
def routes(session) -> RouteBatch:
    return random_routes(session, IDS.numel())


def assert_untouched(model: nn.Module) -> None:
    """Nothing of ours is left; transformers has a hook of its own for checkpointing."""
    for name, module in model.named_modules():
        assert "forward" not in vars(module), name
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        assert [hook for hook in hooks if hook.__module__.startswith("dovetail")] == [], name


# -- finding routers ---------------------------------------------------------------------------


def test_a_session_knows_its_routers_and_leaves_the_model_as_it_was(model):
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    session = ReplaySession(model)
    assert session.layer_ids == (0, 1, 2)
    assert (session.num_experts, session.num_experts_per_tok) == (16, 4)
    assert [router.name for router in session.routers] == [
        f"model.layers.{layer}.mlp.gate" for layer in range(3)
    ]
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_untouched(model)
    model.train()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen3", {}, "qwen3 is dense"),
        ("phimoe", {}, r"phimoe has experts .* without a top-k"),
        ("zaya", {"num_experts_per_tok": 1}, r"zaya has experts .* without a top-k"),
    ],
)
def test_a_model_without_a_top_k_is_refused_by_name(name, options, message):
    with pytest.raises(ReplayError, match=message):
        ReplaySession(tiny_model(name, **options))


def test_a_compiled_model_is_refused():
    model = tiny_model("qwen3_moe")
    with pytest.raises(ReplayError, match="is compiled"):
        ReplaySession(torch.compile(model))
    model.model.layers[0].compile()
    with pytest.raises(ReplayError, match=r"model\.layers\.0 is compiled"):
        ReplaySession(model)


def test_routers_that_do_not_agree_are_refused():
    model = tiny_model("qwen3_moe")
    model.model.layers[1].mlp.gate.top_k = 3
    with pytest.raises(ReplayError, match=r"layers\.1\.mlp\.gate 3 of 16"):
        ReplaySession(model)
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 3
    with pytest.raises(ReplayError, match="select 3 experts of a token, the config says 4"):
        ReplaySession(model)


def test_a_balance_loss_is_no_router():
    model = tiny_model("qwen3_moe", output_router_logits=True)
    assert ReplaySession(model).layer_ids == (0, 1, 2)


def test_noise_on_the_routers_input_is_refused():
    model = tiny_model("mixtral")
    session = ReplaySession(model)
    block = model.model.layers[0].mlp
    block.jitter_noise = 0.1
    with (
        pytest.raises(ReplayError, match=r"noise is added before router model\.layers\.0"),
        session.replay(random_routes(session, IDS.numel())),
    ):
        pass
    model.eval()
    with session.replay(random_routes(session, IDS.numel())), torch.no_grad():
        model(input_ids=IDS)


# -- routes of something else ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: (r.ids_NLK[:, :2], (0, 1), 16), r"no rows for the layers \[2\]"),
        (lambda r: (r.ids_NLK, (0, 1, 7), 16), r"no rows for the layers \[2\]"),
        (
            lambda r: (r.ids_NLK[:, [0, 1, 2, 2]], (0, 1, 2, 3), 16),
            r"layers \[3\], which select no experts",
        ),
        (lambda r: (r.ids_NLK, (0, 1, 2), 64), "num_experts is 16, the routes' 64"),
        (lambda r: (r.ids_NLK[..., :3], (0, 1, 2), 16), "num_experts_per_tok is 4, the routes' 3"),
    ],
)
def test_routes_of_another_model_are_refused(session, routes, change, message):
    ids, layer_ids, num_experts = change(routes)
    other = RouteBatch(ids, routes.has_row_N, layer_ids, num_experts)
    with pytest.raises(ReplayError, match=message), session.replay(other):
        pass


@pytest.mark.parametrize("routes", [None, torch.zeros(10, 3, 4, dtype=torch.uint8)])
def test_what_is_no_batch_of_routes_is_refused(session, routes):
    message = r"routes is (None|a Tensor); give the RouteBatch that TokenTable\.routes"
    with pytest.raises(ReplayError, match=message), session.replay(routes):
        pass


def test_a_name_is_no_model():
    with pytest.raises(ReplayError, match="model is a str; give the module"):
        ReplaySession("a/folder")


def test_another_number_of_tokens_is_refused(model, session, routes):
    message = r"layers\.0\.mlp\.gate was given 6 tokens, the routes have 12"
    with pytest.raises(ReplayError, match=message), session.replay(routes):
        next_token_loss(model, IDS[:1])
    assert_untouched(model)


# -- forward and backward belong inside --------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_to_leave_before_backward_is_an_error(model, session, routes, checkpointing):
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    message = r"backward has not passed 3 of 3 routers.* inside the context"
    with pytest.raises(ReplayError, match=message), session.replay(routes):
        next_token_loss(model, IDS)
    assert_untouched(model)


def test_the_base_model_called_by_itself_is_watched_too(model, session, routes):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ReplayError, match="backward has not passed"), session.replay(routes):
        model.model(input_ids=IDS)


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_around_the_model_or_its_layers_owes_a_backward_too(
    model, session, routes, whole
):
    """Reentrant, and called by the trainer: the model itself is not called with gradients."""

    def layers(hidden: Tensor) -> Tensor:
        positions = torch.arange(IDS.shape[1])[None]
        angles = model.model.rotary_emb(hidden, positions)
        for layer in model.model.layers:
            hidden = checkpoint(
                lambda x, layer=layer: layer(x, position_embeddings=angles),
                hidden,
                use_reentrant=True,
            )
        return hidden

    def all_at_once(hidden: Tensor) -> Tensor:
        run = lambda x: model(inputs_embeds=x, use_cache=False).logits  # noqa: E731
        return checkpoint(run, hidden, use_reentrant=True)

    run = all_at_once if whole else layers
    with session.replay(routes):
        run(model.model.embed_tokens(IDS)).sum().backward()
    with pytest.raises(ReplayError, match="backward has not passed"), session.replay(routes):
        run(model.model.embed_tokens(IDS))


def test_embeddings_that_a_hook_lets_have_gradients_owe_no_backward(model, session, routes):
    """As ``enable_input_require_grads`` does in any forward, here of an inner model."""
    with session.replay(routes) as replay, torch.no_grad():
        model(inputs_embeds=model.model.embed_tokens(IDS).requires_grad_(), use_cache=False)
    assert replay.calls.num_forwards == [1, 1, 1] and replay.calls.num_owed == [0, 0, 0]


def test_a_forward_without_gradients_needs_no_backward(model, session, routes):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with session.replay(routes), torch.no_grad():
        a = next_token_loss(model, IDS)
        b = next_token_loss(model, IDS)
    assert torch.equal(a, b)


def test_logprobs_before_and_the_update_may_share_a_context(model, session, routes):
    with session.replay(routes) as replay:
        with torch.no_grad():
            before = next_token_loss(model, IDS)
        after = outcome(model, lambda: next_token_loss(model, IDS))
    assert torch.equal(before, after[0])
    assert replay.calls.num_forwards == [2, 2, 2] and replay.calls.num_owed == [0, 0, 0]


def test_frozen_routers_and_frozen_first_layers_may_be_replayed(model, session, routes):
    for router in session.routers:
        router.module.requires_grad_(False)
    with session.replay(routes):
        outcome(model, lambda: next_token_loss(model, IDS))
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    try:
        with session.replay(routes):
            _, grads = outcome(model, lambda: next_token_loss(model, IDS))
        assert list(grads) == ["lm_head.weight"]
    finally:
        model.requires_grad_(True)


# -- counters ------------------------------------------------------------------------------------


def test_nothing_that_ran_is_an_error(session, routes):
    for context in (session.replay(routes), session.record()):
        with pytest.raises(ReplayError, match="no forward"), context:
            pass


def test_a_router_that_is_passed_over_is_an_error(model, session, routes, monkeypatch):
    block = model.model.layers[1].mlp
    monkeypatch.setattr(block, "forward", lambda hidden: hidden)
    message = r"1 of 3 .* first is model\.layers\.1\.mlp\.gate"
    with pytest.raises(ReplayError, match=message), session.replay(routes), torch.no_grad():
        next_token_loss(model, IDS)


def test_a_fused_router_is_an_error(model, session, routes, monkeypatch):
    gate = model.model.layers[1].mlp.gate

    def fused(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.zeros(len(hidden), 4, dtype=torch.int64)
        return hidden[:, :16], torch.ones(len(hidden), 4), ids

    monkeypatch.setattr(gate, "forward", fused)
    message = r"layers\.1\.mlp\.gate selected experts 0 times"
    with pytest.raises(ReplayError, match=message), session.replay(routes), torch.no_grad():
        next_token_loss(model, IDS)
    assert gate.forward is fused


def test_two_contexts_on_a_model_are_an_error(model, session, routes):
    other = ReplaySession(model)
    with session.replay(routes), torch.no_grad():
        next_token_loss(model, IDS)
        for context in (session.record(), other.replay(routes)):
            with pytest.raises(ReplayError, match="another context is open"), context:
                pass
        next_token_loss(model, IDS)  # the outer one still works
    assert_untouched(model)


def test_generating_inside_is_an_error_also_where_the_number_of_tokens_stays(model, session):
    """A prompt of one token is as wide as each step after it, which would get the prompt's rows."""
    ids = torch.tensor([[5], [8]])
    message = "a replay is of one set of tokens"
    for use_cache in (True, False):
        with pytest.raises(ReplayError), session.replay(random_routes(session, 2)):
            model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=use_cache)
    assert_untouched(model)
    one = random_routes(session, 2)
    with pytest.raises(ReplayError, match=message), session.replay(one), torch.no_grad():
        model(input_ids=ids)
        model(input_ids=ids.flip(0))
    with pytest.raises(ReplayError, match=message), session.replay(one), torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        model(input_ids=ids, past_key_values=cache)  # the same ids, somewhere else
    held = ids.clone()
    with pytest.raises(ReplayError, match=message), session.replay(one), torch.no_grad():
        model(input_ids=held)
        held[0] += 1  # a buffer that is filled anew
        model(held)


def test_the_same_tokens_may_come_again_behind_a_cached_prefix(model, session):
    ids = torch.tensor([[5], [8]])
    with torch.no_grad(), session.replay(random_routes(session, 2)):
        first, again = (
            model(input_ids=ids, past_key_values=model_cache(model)).logits for _ in range(2)
        )
    assert torch.equal(first, again)


def model_cache(model: nn.Module) -> DynamicCache:
    """Return a cache of three tokens a sequence, whoever computed it."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    shape = (2, config.num_key_value_heads, 3, head_dim)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        generator = torch.Generator().manual_seed(layer)
        cache.update(*torch.randn(2, *shape, generator=generator), layer)
    return cache


@pytest.mark.parametrize("copied", ["model", "layer", "gate"])
@pytest.mark.parametrize("is_recording", [False, True])
def test_a_copy_made_inside_is_an_error(model, session, routes, copied, is_recording):
    """It would keep what is wrapped around its routers: that context's rows, for ever."""
    part = {"model": model, "layer": model.model.layers[1], "gate": model.model.layers[1].mlp.gate}
    context = session.record() if is_recording else session.replay(routes)
    with torch.no_grad(), context:
        native = next_token_loss(model, IDS)
        for copy_of in (copy.deepcopy, pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
            with pytest.raises(ReplayError, match="copied or pickled while a context is open"):
                copy_of(part[copied])
        shallow = copy.copy(model.model.layers[1].mlp.gate)
        assert torch.equal(native, next_token_loss(model, IDS)), "the model is none the worse"
    assert_untouched(model)
    with pytest.raises(ReplayError, match="a context that is closed"):
        shallow(torch.zeros(1, model.config.hidden_size))
    assert_untouched(copy.deepcopy(model))


def test_an_exception_inside_comes_out_and_nothing_stays(model, session, routes):
    native = outcome(model, lambda: next_token_loss(model, IDS))
    with pytest.raises(KeyError), session.replay(routes):
        next_token_loss(model, IDS)
        raise KeyError
    assert_untouched(model)
    assert_same(native, outcome(model, lambda: next_token_loss(model, IDS)))


def test_a_forward_of_the_module_itself_comes_back(model, session, routes):
    gate = model.model.layers[0].mlp.gate
    own = gate.forward
    gate.forward = lambda hidden: own(hidden)  # as hooks of other libraries do
    mine = gate.forward
    try:
        with session.replay(routes), torch.no_grad():
            replayed = next_token_loss(model, IDS)
        assert gate.forward is mine
    finally:
        del gate.forward
    with session.replay(routes), torch.no_grad():
        assert torch.equal(replayed, next_token_loss(model, IDS))


def test_another_model_of_the_process_is_left_alone(model, session, routes):
    other = tiny_model("qwen3_moe")
    with torch.no_grad():
        native = next_token_loss(other, IDS)
        with session.replay(routes):
            assert not torch.equal(next_token_loss(model, IDS), native)
            assert torch.equal(next_token_loss(other, IDS), native)
