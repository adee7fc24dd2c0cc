"""Reported bugs of other engines, classes 1, 2 and 5: retraction, chunks, cache, late results.

Tests are named by the ids of ``docs/testing.md``, where all of them are listed.
"""

import numpy as np
import pytest

from dovetail.wire.request import LogprobParams
from tests.support.answers import check_output
from tests.support.harness import Harness
from tests.support.scripted_engine import scripted_engine
from tests.support.traffic import fill_a_page_with_nan

TOP = LogprobParams(logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=(4,))


def engine_of(folder, **options: object) -> Harness:
    defaults = {"dtype": "float32", "context_len": 96, "num_pages": 400, "max_running": 16}
    return Harness(folder, **(defaults | options))


def prompts(count: int, low: int, high: int, *, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 250, rng.integers(low, high + 1)).tolist() for _ in range(count)]


def check_lens(output, prompt) -> None:
    """Ids, logprobs, top lists and counts are of one length."""
    count = output.usage.completion_tokens
    assert count == len(output.token_ids) == len(output.logprobs)
    assert len(output.top) in (0, count) and len(output.id_logprobs) in (0, count)
    assert output.usage.prompt_tokens == len(prompt)
    assert output.usage.cached_tokens <= len(prompt) - 1
    if output.captured:
        assert len(output.captured["tokens"]) == len(prompt) + max(count - 1, 0)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b11_b13_b63_rows_and_logprobs_survive_retraction(llama_folder, llama_oracle, depth):
    """vllm #45635, sglang #24001, #20724, #39949: rows lost, or K + N logprobs for N tokens.

    A pool for one and a half; every column is that of the very sequence, as in a large pool.
    """
    asked, params = prompts(16, 5, 30), {"temperature": 1.0, "max_new_tokens": 24}
    small = engine_of(llama_folder, depth=depth, page_size=4, num_pages=36, max_running=8)
    large = engine_of(llama_folder, depth=depth, page_size=4)
    rng = np.random.default_rng(depth)
    small.scheduler._lengths.share = 0.0
    small.on_step = lambda n: rng.random() < 0.1 and small.scheduler.retract_last()
    for harness in (small, large):
        for seed, prompt in enumerate(asked):
            harness.add(prompt, capture=("tokens",), logprobs=TOP, sampling_seed=seed, **params)
        harness.run()
    retractions = sum(o.usage.num_retractions for o in small.all_outputs)
    assert retractions >= 8, retractions
    for seed, prompt in enumerate(asked):
        got, want = small.outputs[seed], large.outputs[seed]
        check_lens(got, prompt)
        assert got.token_ids == want.token_ids
        forwarded = [*prompt, *got.token_ids][: len(prompt) + len(got.token_ids) - 1]
        assert got.captured["tokens"].tolist() == forwarded
        all_params = params | {"sampling_seed": seed}
        check_output(got, prompt, all_params, llama_oracle, logprobs=TOP)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b19_each_goes_on_from_its_own_prompt_through_many_chunks(fx_count_folder, depth):
    """sglang-jax #1487, #1504: a ring of tokens to come wrapped while prompts were in chunks."""
    harness = engine_of(fx_count_folder, depth=depth, max_running=8, chunk_size=12)
    lasts = []
    for client in range(64):
        length = 37 + client % 20  # four chunks at least, and more where they share a step
        prompt = [(5 * client + i) % 200 for i in range(length)]
        lasts.append(prompt[-1])
        harness.add(prompt, max_new_tokens=1 + client % 9, temperature=0.0, ignore_eos=True)
    outputs = harness.run()
    for client, last in enumerate(lasts):
        assert outputs[client].token_ids == [last + 1 + i for i in range(1 + client % 9)], client


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b25_pages_of_one_that_stopped_are_not_written_any_more(fx_tag_folder, depth):
    """vllm #45357: found finished after the next step had been launched; its pages went on."""
    harness = engine_of(
        fx_tag_folder, depth=depth, page_size=4, num_pages=24, context_len=96, max_running=4
    )
    rng = np.random.default_rng(1)
    for turn in range(20):
        first, second = rng.choice(100, 2, replace=False).tolist()
        a = harness.add(
            [first, *[200] * 46], max_new_tokens=40, stop_token_ids=(first,), temperature=0.0
        )
        while not harness.outputs[a].token_ids:
            harness.step()
        # B's prompt fills what A leaves, and no more pages are free than it needs.
        b = harness.add([second, *[201 + turn % 9] * 86], max_new_tokens=8, temperature=0.0)
        outputs = harness.run()
        assert outputs[a].token_ids == [first]
        assert outputs[b].token_ids == [second] * 8, turn


def test_b29_a_hundred_pauses_change_nothing(llama_folder):
    """TensorRT-LLM #10943: one token too many after a pause."""
    asked = prompts(8, 4, 20, seed=2)
    quiet, paused = engine_of(llama_folder, depth=2), engine_of(llama_folder, depth=2)
    rng, pauses = np.random.default_rng(4), 0

    def pause(_: int) -> None:
        nonlocal pauses
        if pauses < 100 and rng.random() < 0.9:
            pauses += paused.scheduler.retract_last() is not None

    paused.on_step = pause
    for harness in (quiet, paused):
        for prompt in asked:
            harness.add(prompt, max_new_tokens=60, temperature=0.0, ignore_eos=True)
        harness.run()
    assert pauses == 100
    for request_id, prompt in enumerate(asked):
        check_lens(paused.outputs[request_id], prompt)
        assert paused.outputs[request_id].token_ids == quiet.outputs[request_id].token_ids


def test_b31_concurrency_and_chunks_change_no_token(llama_folder, llama_oracle):
    """TensorRT-LLM #4037, sglang #1434: quality fell at large batch with overlap and chunks."""
    asked, seen = prompts(18, 3, 40, seed=3), []
    params = {"max_new_tokens": 8, "temperature": 0.0}
    for max_running, chunk_size, depth in ((1, -1, 0), (8, 7, 1), (24, -1, 1), (24, 16, 2)):
        harness = engine_of(
            llama_folder, max_running=max_running, chunk_size=chunk_size, depth=depth
        )
        for prompt in asked:
            harness.add(prompt, **params)
        outputs = harness.run()
        for request_id, prompt in enumerate(asked):
            check_output(outputs[request_id], prompt, params, llama_oracle)
        seen.append([tuple(o.token_ids) for o in outputs.values()])
    assert all(tokens == seen[0] for tokens in seen)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b65_a_retracted_one_may_find_its_prefix_cached(depth):
    """nano-vllm #211: sizes computed before a lookup that changed them. 256 with one prefix."""
    answers = []
    for num_pages in (20, 600):
        engine = scripted_engine(
            context_len=64, page_size=4, num_pages=num_pages, max_running=12, depth=depth
        )
        engine.scheduler._lengths.share = 0.0
        for i in range(256):
            engine.add([5] * 21 + [3 + i % 27], max_new_tokens=9 + i % 5, ignore_eos=True)
        outputs = engine.run()
        answers.append([o.token_ids for o in outputs.values()])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("count", [2, 20])
def test_b67_two_that_do_not_fit_together_take_turns(depth, count):
    """vllm-ascend #16315: preempted, admitted, preempted for ever; no token for anybody."""
    engine = scripted_engine(
        context_len=64, page_size=4, num_pages=16, max_running=8, chunk_size=16, depth=depth
    )
    engine.scheduler._lengths.share = 0.0  # admit what cannot stay
    for i in range(count):
        engine.add([3 + i] * 10, max_new_tokens=28, ignore_eos=True)
    last_news, tokens = 0, 0

    def watch(step: int) -> None:
        nonlocal last_news, tokens
        now = sum(len(o.token_ids) for o in engine.all_outputs)
        last_news, tokens = (step, now) if now > tokens else (last_news, tokens)
        assert step - last_news <= 12, "nobody gets on"

    engine.on_step = watch
    outputs = engine.run()
    assert all(len(o.token_ids) == 28 for o in outputs.values())


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_b69_many_prompts_are_chunked_at_once(llama_folder, llama_oracle, prefix_cache):
    """sglang #2255, #12676: a single, global 'request being chunked'."""
    asked = prompts(20, 40, 120, seed=5)
    params = {"max_new_tokens": 4, "temperature": 0.0}
    harness = engine_of(
        llama_folder, context_len=140, chunk_size=16, prefix_cache=prefix_cache, num_pages=60
    )
    for prompt in asked:
        harness.add(prompt, **params)
    outputs = harness.run()
    for request_id, prompt in enumerate(asked):
        check_output(outputs[request_id], prompt, params, llama_oracle)
    harness.ledger.flush()
    assert harness.ledger.stats().free == 60
    last = harness.ask([5] * 130, max_new_tokens=9, ignore_eos=True)
    assert last.finish.type == "length"


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}])
@pytest.mark.parametrize("page_size", [1, 16])
def test_b71_prompt_and_partial_output_continue_the_output(llama_folder, params, page_size):
    """sglang-jax #580: extend and decode disagreed. Noise has positions, so samples go on too."""
    harness = engine_of(llama_folder, page_size=page_size)
    prompt, *_ = prompts(1, 20, 20, seed=6)
    params = params | {"sampling_seed": 8, "ignore_eos": True}
    whole = harness.ask(prompt, max_new_tokens=31, **params).token_ids
    ids = [harness.add(prompt + whole[:k], max_new_tokens=31 - k, **params) for k in range(1, 31)]
    outputs = harness.run()
    for k, request_id in enumerate(ids, start=1):
        assert outputs[request_id].token_ids == whole[k:], k


@pytest.mark.parametrize("page_size", [4, 16])
def test_b73_a_partial_page_is_never_shared(llama_folder, llama_oracle, page_size):
    """vllm #55766: NaN after a hit when the prefill before ended a little past a page border."""
    rng = np.random.default_rng(7)
    params = {"max_new_tokens": 3, "temperature": 0.0}
    warm = engine_of(llama_folder, page_size=page_size)
    for extra in range(page_size + 1):
        a = rng.integers(3, 250, 2 * page_size + extra).tolist()
        b = a + rng.integers(3, 250, 7).tolist()
        warm.ask(a, **params)
        output = warm.ask(b, logprobs=TOP, **params)
        check_output(output, b, params, llama_oracle, logprobs=TOP)
        plain = warm.ask(b, **params)
        assert plain.usage.cached_tokens >= 2 * page_size
        assert plain.token_ids == output.token_ids and np.isfinite(plain.logprobs).all()


@pytest.mark.parametrize(("depth", "chunk_size"), [(0, 5), (1, 5), (2, 18)])
def test_b73_a_page_that_is_half_computed_is_never_shared(
    llama_folder, llama_oracle, depth, chunk_size
):
    """The other comes while the first is in the middle of a page."""
    rng = np.random.default_rng(8)
    params = {"max_new_tokens": 3, "temperature": 0.0}
    a = rng.integers(3, 250, 40).tolist()
    b = a[:37] + rng.integers(3, 250, 5).tolist()
    for steps in (1, 3, 5):
        harness = engine_of(llama_folder, page_size=16, chunk_size=chunk_size, depth=depth)
        first = harness.add(a, **params)
        for _ in range(steps):
            harness.step()
        second = harness.add(b, **params)
        outputs = harness.run()
        check_output(outputs[first], a, params, llama_oracle)
        check_output(outputs[second], b, params, llama_oracle)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b141_nan_stays_with_its_request(llama_folder, depth) -> None:
    """vllm #50002, #50283: NaN of one request's cache reaches others through pages and prefixes.

    The 50 beside it, some of which get its pages, are those of a run without NaN; so is the same
    prompt, asked again.
    """
    asked, greedy = prompts(51, 20, 40), {"max_new_tokens": 24, "temperature": 0.0}
    spoilt, clean = (engine_of(llama_folder, depth=depth, page_size=8) for _ in range(2))
    for harness in (spoilt, clean):
        for prompt in asked:
            harness.add(prompt, ignore_eos=True, **greedy)
        while len(harness.outputs[3].token_ids) < 5:
            harness.step()
    fill_a_page_with_nan(spoilt, 3)
    for harness in (spoilt, clean):
        harness.run()
    again = spoilt.ask(asked[3], ignore_eos=True, **greedy)
    failed = spoilt.outputs[3]
    assert failed.finish.type == "error" and "not finite" in failed.finish.message
    assert again.token_ids == clean.outputs[3].token_ids
    for number in set(range(51)) - {3}:
        assert spoilt.outputs[number].token_ids == clean.outputs[number].token_ids


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("prompt_len", "num_published"), [(5, 0), (15, 1), (24, 3)])
def test_b141_one_that_is_aborted_leaves_no_nan_behind(
    llama_folder, depth, prompt_len, num_published
) -> None:
    """Its end is decided before the row that met NaN comes back; the page is its own or shared."""
    harness = engine_of(llama_folder, depth=depth, page_size=8)
    prompt, greedy = [7] * prompt_len, {"max_new_tokens": 30, "temperature": 0.0}
    number = harness.add(prompt, ignore_eos=True, **greedy)
    while len(harness.outputs[number].token_ids) < 14:
        harness.step()
    (sequence,) = harness.scheduler._running
    assert len(sequence.held.path) == num_published
    fill_a_page_with_nan(harness, number)
    harness.step()
    harness.abort(number)
    harness.run()
    assert harness.outputs[number].finish.type == "abort"
    ids = [*prompt, *harness.outputs[number].token_ids]
    assert harness.ledger.match_len(b"", ids, max_cached=len(ids)) == 0
    assert harness.ask(ids, ignore_eos=True, **greedy).finish.type == "length"
