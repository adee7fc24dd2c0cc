"""The oracle agrees with Hugging Face where both can be asked, and with itself elsewhere."""

import numpy as np
import pytest
import torch

from tests.support.compare import assert_follows, assert_logprobs, assert_same_tokens
from tests.support.oracle import Oracle

MODELS = ("llama", "qwen3", "qwen3_moe")
PROMPT = tuple(range(7, 67, 3))
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 2**40 + 5}


@pytest.fixture(params=MODELS)
def oracle(request):
    return request.getfixturevalue(f"{request.param}_oracle")


def test_one_thread(llama_oracle):
    assert torch.get_num_threads() == 1


def test_greedy_equals_generate_with_a_cache(oracle):
    for prompt in (PROMPT, PROMPT[:1], PROMPT[::-1]):
        want = oracle.generate(prompt, max_new_tokens=30, temperature=0)
        ids = oracle.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=30,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert assert_same_tokens(ids[0, len(prompt) :].tolist(), want) == 30
        assert len(set(want.token_ids)) > 12  # an oracle that repeats itself would show little


def test_logprobs_equal_one_teacher_forced_forward(oracle):
    for sampling in ({"temperature": 0}, {"temperature": 1.7, "seed": 3}, SAMPLED):
        want = oracle.generate(PROMPT, max_new_tokens=25, **sampling)
        scored = oracle.score(PROMPT, want.token_ids, sampling["temperature"])
        assert_logprobs(scored, want.logprobs)


def test_prompt_and_partial_output_continue_the_same_tokens(oracle):
    whole = oracle.generate(PROMPT, max_new_tokens=20, **SAMPLED)
    rest = oracle.generate(PROMPT + whole.token_ids[:8], max_new_tokens=12, **SAMPLED)
    assert whole.token_ids[8:] == rest.token_ids


def test_samples_and_seeds_differ(llama_oracle):
    outputs = {
        llama_oracle.generate(PROMPT, max_new_tokens=10, seed=seed, sample_index=i).token_ids
        for seed in (0, 1)
        for i in (0, 1)
    }
    assert len(outputs) == 4


def test_attention_kernels_agree(llama_folder, llama_oracle):
    eager = Oracle(llama_folder, attention="eager")
    for sampling in ({"temperature": 0}, SAMPLED):
        got = eager.generate(PROMPT, max_new_tokens=30, **sampling)
        want = llama_oracle.generate(PROMPT, max_new_tokens=30, **sampling)
        assert_same_tokens(got.token_ids, want)


def test_stops_end_a_generation_and_are_part_of_it(llama_oracle):
    whole = llama_oracle.generate(PROMPT, max_new_tokens=12, temperature=0)
    assert whole.finish == "length"
    at = next(i for i in range(3, 12) if whole.token_ids[i] not in whole.token_ids[:i])
    for stops in ("stop_token_ids", "eos_ids"):
        cut = llama_oracle.generate(
            PROMPT, max_new_tokens=12, temperature=0, **{stops: [whole.token_ids[at]]}
        )
        assert cut.finish == "stop"
        assert cut.token_ids == whole.token_ids[: at + 1]
        columns = (cut.logprobs, cut.gaps, cut.border_gaps, cut.router_gaps)
        assert {len(column) for column in columns} == {at + 1}


def test_no_tokens_asked_none_given(llama_oracle):
    none = llama_oracle.generate(PROMPT, max_new_tokens=0)
    assert (none.token_ids, none.logprobs, none.finish) == ((), (), "length")
    assert llama_oracle.score(PROMPT, ()).shape == (0,)


def test_the_same_question_costs_nothing(llama_folder, monkeypatch):
    oracle = Oracle(llama_folder)
    first = oracle.generate(PROMPT, max_new_tokens=5, **SAMPLED)
    monkeypatch.setattr(oracle, "_forward", None)
    assert oracle.generate(list(PROMPT), max_new_tokens=5, **SAMPLED) is first
    # Other parameters on the same ids draw from remembered logits.
    assert oracle.generate(PROMPT, max_new_tokens=1, temperature=0).token_ids


def test_routing_equals_the_routers_own_choice(fx_moe_oracle):
    chosen = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
        for name, module in fx_moe_oracle.model.named_modules()
        if name.endswith("mlp.gate")
    ]
    routing = fx_moe_oracle.router_ids(PROMPT)
    for hook in hooks:
        hook.remove()
    assert routing.expert_ids.shape == (len(PROMPT), 3, 2)
    assert routing.gaps.shape == routing.order_gaps.shape == (len(PROMPT), 3)
    assert routing.gaps.min() > 1e-5
    np.testing.assert_array_equal(routing.expert_ids, torch.stack(chosen, dim=1).numpy())


def test_router_gap_of_a_token_is_the_least_on_the_way(fx_moe_oracle):
    want = fx_moe_oracle.generate(PROMPT, max_new_tokens=6, temperature=0)
    gaps = fx_moe_oracle.router_ids(PROMPT + want.token_ids).gaps
    for i, router_gap in enumerate(want.router_gaps):
        assert router_gap == pytest.approx(gaps[: len(PROMPT) + i].min(), abs=1e-5)


def test_dense_models_have_no_routing(llama_oracle):
    with pytest.raises(ValueError, match="no MoE layers"):
        llama_oracle.router_ids(PROMPT)
    assert llama_oracle.generate(PROMPT, max_new_tokens=1).router_gaps == (np.inf,)


RICH = {
    "temperature": 0.9,
    "top_k": 50,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.3,
    "logit_bias": {5: 3.0, 60: 9.0},
    "min_new_tokens": 6,
    "stop_token_ids": (60, 61, 62),
    "seed": 4,
    "sample_index": 2,
}


@pytest.mark.parametrize("kind", ["scaled", "raw", "truncated"])
def test_following_a_right_output_gives_it_back(oracle, kind):
    """One forward over all tokens is as good as one for each."""
    for fields in ({"temperature": 0}, SAMPLED, RICH):
        want = oracle.generate(PROMPT, max_new_tokens=16, kind=kind, **fields)
        got = oracle.follow(PROMPT, want.token_ids, kind=kind, **fields)
        assert not assert_follows(want.token_ids, got)
        assert got.finish == want.finish and got.noise_scale == want.noise_scale
        assert_logprobs(got.logprobs, want.logprobs)
        np.testing.assert_allclose(got.router_gaps, want.router_gaps, atol=1e-5)
    assert want.finish == "stop" and len(want.token_ids) > 6


def test_following_a_wrong_output_finds_the_wrong_token(llama_oracle):
    want = llama_oracle.generate(PROMPT, max_new_tokens=12, **RICH)
    for at in (0, 3, 6):
        wrong = [*want.token_ids[:at], (want.token_ids[at] + 1) % 60, *want.token_ids[at + 1 :]]
        with pytest.raises(AssertionError, match="no tie"):
            assert_follows(wrong, llama_oracle.follow(PROMPT, wrong, **RICH))


def test_prompt_logprobs_are_those_of_the_score(oracle):
    for temperature, kind in ((0.7, "scaled"), (0, "scaled"), (0.7, "raw")):
        rows = oracle.prompt_logprobs(PROMPT, temperature=temperature, kind=kind)
        assert rows.shape == (len(PROMPT) - 1, oracle.vocab_size)
        chosen = rows[np.arange(len(PROMPT) - 1), PROMPT[1:]]
        want = oracle.score(PROMPT[:1], PROMPT[1:], temperature if kind == "scaled" else 1.0)
        assert_logprobs(chosen, want)


def test_every_rule_changes_the_output(llama_oracle):
    plain = llama_oracle.generate(PROMPT, max_new_tokens=40, seed=1)
    for effect in (
        {"repetition_penalty": 2.0},
        {"frequency_penalty": 3.0},
        {"presence_penalty": 3.0},
        {"logit_bias": {9: 20.0}},
        {"sample_index": 1},
    ):
        changed = llama_oracle.generate(PROMPT, max_new_tokens=40, seed=1, **effect)
        assert changed.token_ids != plain.token_ids, effect
