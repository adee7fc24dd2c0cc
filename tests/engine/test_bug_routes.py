"""Reported bugs of other engines, class 1: experts lost, shifted, stale, or of another request.

Tests are named by the ids of ``docs/testing.md``, where all of them are listed. B07 waits for
drafts, B17 for several ranks.
"""

from itertools import groupby

import numpy as np
import pytest

from dovetail.errors import ConfigError
from dovetail.replay.records import RouteTrace
from dovetail.wire.request import CaptureParams
from tests.support.harness import Harness, Output, make_config
from tests.support.routes import check_routes

EXPERTS = CaptureParams(columns=("experts",))
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def engine_of(folder, **options: object) -> Harness:
    defaults = {"dtype": "float32", "context_len": 96, "num_pages": 400, "max_running": 16}
    return Harness(folder, capture=("experts",), **(defaults | options))


def prompts(count: int, low: int, high: int, *, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 250, rng.integers(low, high + 1)).tolist() for _ in range(count)]


def rows_of(output: Output) -> np.ndarray:
    return output.captured["experts"]


def longest_run(rows: np.ndarray) -> int:
    """Rows that are equal to the one before, at most, and the first of them."""
    return max(len(list(group)) for _, group in groupby(row.tobytes() for row in rows))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("max_new_tokens", "num_rows"), [(0, 5), (1, 5), (4, 8)])
def test_b01_every_forwarded_token_has_a_row(
    fx_moe_folder, fx_moe_oracle, depth, max_new_tokens, num_rows
):
    """sglang #20964: prefill-only requests lose the row of the last prompt token."""
    (prompt,) = prompts(1, 5, 5)
    output = engine_of(fx_moe_folder, depth=depth).ask(
        prompt, capture=EXPERTS, max_new_tokens=max_new_tokens, **GREEDY
    )
    assert len(rows_of(output)) == num_rows
    check_routes(output, prompt, fx_moe_oracle)


@pytest.mark.parametrize("chunk_size", [4, 7])
@pytest.mark.parametrize("depth", [0, 1])
def test_b03_no_row_of_an_earlier_step_is_repeated(fx_moe_folder, fx_moe_oracle, depth, chunk_size):
    """sglang #36404: one real-looking row 67 times from the border of a chunk on."""
    for prompt_len in (chunk_size - 1, chunk_size, chunk_size + 1, 2 * chunk_size + 3):
        harness = engine_of(fx_moe_folder, depth=depth, chunk_size=chunk_size, page_size=4)
        warm_up, prompt = prompts(2, 20, 20, seed=prompt_len)
        harness.ask(warm_up, max_new_tokens=9, **GREEDY)
        prompt = prompt[:prompt_len]
        output = harness.ask(prompt, capture=EXPERTS, max_new_tokens=6, **GREEDY)
        check_routes(output, prompt, fx_moe_oracle, borders={"chunk": chunk_size})
        want = fx_moe_oracle.router_ids([*prompt, *output.token_ids][:-1]).expert_ids
        assert longest_run(rows_of(output)) == longest_run(want)


def test_b05_a_prompt_may_be_longer_than_any_batch_of_decodes(qwen3_moe_folder, qwen3_moe_oracle):
    """sglang #26860: the scheduler dies when a prefill is longer than the capture buffer."""
    harness = engine_of(
        qwen3_moe_folder, chunk_size=-1, max_running=4, context_len=512, page_size=16
    )
    (prompt,) = prompts(1, 500, 500)
    output = harness.ask(prompt, capture=EXPERTS, max_new_tokens=4, **GREEDY)
    check_routes(output, prompt, qwen3_moe_oracle)
    other = harness.ask(prompt[:9], capture=EXPERTS, max_new_tokens=4, **GREEDY)
    check_routes(other, prompt[:9], qwen3_moe_oracle)


@pytest.mark.parametrize("depth", [0, 1])
def test_b09_prompt_rows_of_a_hit_are_there(fx_moe_folder, fx_moe_oracle, depth):
    """vllm-project/tpu-inference #3583: prompt rows are zeros, generated rows are right."""
    harness = engine_of(fx_moe_folder, depth=depth, page_size=4)
    (prompt,) = prompts(1, 30, 30)
    (suffix,) = prompts(1, 20, 20, seed=1)
    miss, hit, longer = (
        harness.ask(ids, capture=EXPERTS, max_new_tokens=8, **GREEDY)
        for ids in (prompt, prompt, prompt + suffix)
    )
    assert [output.usage.cached_tokens for output in (miss, hit, longer)] == [0, 28, 28]
    for output, ids in ((miss, prompt), (hit, prompt), (longer, prompt + suffix)):
        check_routes(output, ids, fx_moe_oracle, borders={"page": 4})
        parts = rows_of(output)[: len(ids)], rows_of(output)[len(ids) :]
        assert all(part.any() for part in parts)
    np.testing.assert_array_equal(rows_of(hit)[:30], rows_of(miss)[:30])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b11_slots_are_not_reused_before_they_are_read(fx_moe_folder, fx_moe_oracle, depth):
    """vllm #45635: the next step preempts A, whose slots are reused before its rows are read."""
    harness = engine_of(
        fx_moe_folder, depth=depth, page_size=4, num_pages=36, context_len=96, max_running=8
    )
    asked = prompts(16, 5, 30)
    for seed, prompt in enumerate(asked):
        harness.add(prompt, capture=EXPERTS, max_new_tokens=40, sampling_seed=seed, ignore_eos=True)
    harness.on_step = lambda n: setattr(harness.scheduler._lengths, "share", 0.0)
    harness.run()
    assert sum(output.usage.num_retractions for output in harness.all_outputs) > 3
    for index, prompt in enumerate(asked):
        check_routes(harness.outputs[index], prompt, fx_moe_oracle, borders={"page": 4})


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b13_rows_of_the_retracted_are_those_of_a_large_pool(fx_moe_folder, depth):
    """sglang #24001: rows are lost or mixed when a request is retracted."""
    asked = prompts(24, 5, 30)
    small = engine_of(fx_moe_folder, depth=depth, page_size=16, num_pages=32)
    large = engine_of(fx_moe_folder, depth=depth, page_size=16)
    rng = np.random.default_rng(depth)
    small.on_step = lambda n: rng.random() < 0.25 and small.scheduler.retract_last()
    for harness in (small, large):
        for prompt in asked:
            harness.add(prompt, capture=EXPERTS, max_new_tokens=40, **GREEDY)
        harness.run()
    assert sum(output.usage.num_retractions for output in small.all_outputs) >= 24
    assert any(s.num_recomputed for o in small.all_outputs for s in o.spans["experts"])
    for index, prompt in enumerate(asked):
        got, want = small.outputs[index], large.outputs[index]
        assert got.token_ids == want.token_ids
        assert len(rows_of(got)) == len(prompt) + 39
        np.testing.assert_array_equal(rows_of(got), rows_of(want))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("abort_at", [3, 15, 20])
def test_b15_turns_join_without_gap_or_overlap(fx_moe_folder, fx_moe_oracle, depth, abort_at):
    """verl #6029, #6046, #6054: full-length rows joined to old rows; rows of a newer policy."""
    harness = engine_of(fx_moe_folder, depth=depth, page_size=4)
    (prompt,) = prompts(1, 20, 20)
    first_id = harness.add(prompt, capture=EXPERTS, max_new_tokens=64, **GREEDY)
    while len(harness.outputs[first_id].token_ids) < abort_at:
        harness.step()
    harness.abort(first_id)
    first = harness.run()[first_id]
    assert first.finish.type == "abort" and 0 < len(first.token_ids) < 64
    known = prompt + first.token_ids
    second = harness.ask(
        known,
        capture=CaptureParams(columns=("experts",), start_len=len(known) - 1),
        max_new_tokens=64 - len(first.token_ids),
        **GREEDY,
    )
    whole = harness.ask(prompt, capture=EXPERTS, max_new_tokens=64, **GREEDY)
    ids = known + second.token_ids
    assert ids == prompt + whole.token_ids
    check_routes(first, prompt, fx_moe_oracle)
    check_routes(second, known, fx_moe_oracle, start=len(known) - 1)
    assert len(rows_of(first)) + len(rows_of(second)) == len(ids) - 1
    moe = harness.config.model.moe
    parts = [
        RouteTrace.of_tokens(
            rows_of(output),
            ids,
            layer_ids=moe.layer_ids,
            num_experts=moe.num_experts,
            start=start,
            spans=output.spans["experts"],
        )
        for output, start in ((first, 0), (second, len(known) - 1))
    ]
    joined = RouteTrace.concat(parts, ids)
    np.testing.assert_array_equal(joined.ids, rows_of(whole))


def test_rows_of_one_aborted_while_it_waits_for_memory_again_are_there(
    fx_moe_folder, fx_moe_oracle
):
    """Retracted and aborted before it runs again: its tokens have left, so their rows must."""
    for turns in range(8):
        harness = engine_of(fx_moe_folder, page_size=4, num_pages=26, max_running=2)
        first, second = prompts(2, 12, 12)
        harness.add(first, capture=EXPERTS, max_new_tokens=60, **GREEDY)
        victim = harness.add(second, capture=EXPERTS, max_new_tokens=60, **GREEDY)
        for _ in range(14):
            harness.step()
        harness.scheduler.retract_last()
        for _ in range(turns):
            harness.step()
        harness.abort(victim)
        output = harness.run()[victim]
        assert output.finish.type == "abort" and len(output.token_ids) > 5
        check_routes(output, second, fx_moe_oracle, context=f"aborted after {turns} turns")


def test_a_dense_model_is_refused_by_the_name_of_the_flag(llama_folder):
    with pytest.raises(ConfigError, match=r"capture: LlamaForCausalLM is dense.*--capture"):
        make_config(llama_folder, capture=("experts",))
    with pytest.raises(ConfigError, match=r"capture: 'routes' is no column; the columns are expe"):
        make_config(llama_folder, capture=("routes",))
    assert make_config(llama_folder, capture=("tokens",)).capture == ()


def test_weights_are_those_of_the_same_choice(fx_moe_folder):
    """The second column goes the same way: it sums to one where the model normalises."""
    harness = Harness(fx_moe_folder, capture=("experts", "expert_weights"), context_len=64)
    output = harness.ask(
        [5, 6, 7], capture=("expert_weights", "experts"), max_new_tokens=9, temperature=0.0
    )
    weights, experts = output.captured["expert_weights"], output.captured["experts"]
    assert weights.shape == experts.shape == (11, 3, 2) and weights.dtype == np.float32
    assert harness.config.model.moe.norm_topk_prob
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)
    assert (weights[..., 0] >= weights[..., 1]).all() and len(np.unique(weights)) > 60
