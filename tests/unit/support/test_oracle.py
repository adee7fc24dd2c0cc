"""The oracle agrees with Hugging Face where both can be asked, and with itself elsewhere."""

import numpy as np
import pytest
import torch

from tests.support.compare import assert_logprobs, assert_same_tokens
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
