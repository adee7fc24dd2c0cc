"""Reported bugs of other engines, class 4: logprobs and supports must be true.

Tests are named by the ids of ``docs/testing.md``, where all of them are listed.
"""

import itertools
import json
import math

import numpy as np
import pytest

from dovetail.core.engine import Engine
from dovetail.core.reply import generate_reply
from dovetail.wire.request import CaptureParams, LogprobParams, SamplingParams
from tests.support.answers import check_output, check_prompt_scores, follow
from tests.support.compare import assert_logprobs
from tests.support.harness import Harness

PROMPT = [7 * i % 250 + 3 for i in range(20)]
TOP = LogprobParams(logprob_start_len=0, top_logprobs_num=5, token_ids_logprob=(1, 2, 3))


@pytest.fixture(scope="module")
def engine(tiny_moe_folder):
    with Engine(tiny_moe_folder, context_len=160, max_running=16, num_pages=200) as engine:
        yield engine


def engine_of(folder, **options: object) -> Harness:
    defaults = {"dtype": "float32", "context_len": 160, "num_pages": 400, "max_running": 40}
    return Harness(folder, **(defaults | options))


@pytest.mark.parametrize("kind", ["scaled", "raw", "truncated"])
def test_b47_a_logprob_means_what_was_asked_for(llama_folder, llama_oracle, kind):
    """trl #4159, verl #6240: raw logprobs where the trainer used scaled ones: ratios of 2."""
    harness, requests = engine_of(llama_folder), []
    asked = LogprobParams(kind=kind)
    for temperature, cut in itertools.product((0.6, 1.0, 1.7), ({}, {"top_p": 0.9}, {"top_k": 5})):
        params = {"temperature": temperature, "max_new_tokens": 16, "sampling_seed": 3, **cut}
        requests.append((params, harness.add(PROMPT, logprobs=asked, **params)))
    outputs = harness.run()
    for params, request_id in requests:
        check_output(outputs[request_id], PROMPT, params, llama_oracle, logprobs=asked)
    kinds_differ = {round(outputs[i].logprobs[0], 4) for _, i in requests}
    assert len(kinds_differ) >= (1 if kind == "raw" else 3)


@pytest.mark.parametrize("model", ["llama", "fx_moe"])
def test_b49_rescoring_by_prefill_gives_the_logprobs_of_decoding(request, model):
    """sglang #30821: two formulas for one number. Cold and cached; alone and among 32."""
    folder = request.getfixturevalue(f"{model}_folder")
    harness = engine_of(folder, context_len=200)
    output = harness.ask(
        PROMPT, max_new_tokens=64, temperature=1.0, sampling_seed=5, ignore_eos=True
    )
    whole = PROMPT + output.token_ids
    for num_others, is_cold in ((0, True), (0, False), (31, True), (31, False)):
        again = engine_of(folder, context_len=200) if is_cold else harness
        others = [
            again.add([3 + i, *PROMPT[: i % 19]], max_new_tokens=3, temperature=0.0)
            for i in range(num_others)
        ]
        scored = again.add(
            whole,
            max_new_tokens=0,
            temperature=1.0,
            logprobs=LogprobParams(logprob_start_len=len(PROMPT)),
        )
        result = again.run()[scored]
        assert others == [] or result.usage.completion_tokens == 0
        assert is_cold == (result.usage.cached_tokens == 0)
        assert_logprobs(result.prompt_scores.logprobs, output.logprobs, 1e-5)


def test_b51_prompt_logprobs_do_not_depend_on_what_is_cached(llama_folder, llama_oracle):
    """vllm #42019: logprobs of cached positions were memory of earlier requests."""
    a = PROMPT + [5, 6, 7] * 12
    b = PROMPT + [5, 6, 7] * 6 + [9] * 9
    for order in ([a, b], [b, a], [a, a, b]):
        harness = engine_of(llama_folder, page_size=4)
        for prompt in order:
            for start in (0, 10, len(prompt) - 1):
                asked = LogprobParams(logprob_start_len=start, top_logprobs_num=3)
                params = {"max_new_tokens": 2, "temperature": 0.0}
                output = harness.ask(prompt, logprobs=asked, **params)
                check_output(output, prompt, params, llama_oracle, logprobs=asked)


def test_b53_a_stream_has_as_many_logprobs_as_ids(engine):
    """sglang #21583: ids as deltas, logprobs cumulative. All columns share one cursor."""
    params = SamplingParams(max_new_tokens=60, sampling_seed=4, n=2, ignore_eos=True)
    whole = engine.generate(PROMPT, params, logprobs=TOP)
    events = list(engine.stream(PROMPT, params, logprobs=TOP))
    assert len(events) > 60
    for event in events:
        count = len(event.token_ids)
        assert count == len(event.logprobs) == len(event.weight_versions)
        if event.scores is not None:
            assert count == len(event.scores.top_ids) == len(event.scores.top_logprobs)
            assert count == len(event.scores.id_logprobs)
        else:
            assert not count
    for sample_index, generation in enumerate(whole):
        mine = [e for e in events if e.sample_index == sample_index]
        joined = [t for e in mine for t in e.token_ids]
        assert joined == list(generation.token_ids)
        assert "".join(e.text for e in mine) == generation.text
        assert_logprobs([x for e in mine for x in e.logprobs], generation.logprobs, 1e-5)
        tops = [ids for e in mine if e.scores for ids in e.scores.top_ids]
        assert tops == [tuple(i for i, _ in row) for row in generation.top_logprobs]
        assert [e.finish_reason is not None for e in mine] == [False] * (len(mine) - 1) + [True]
        prompt = [e.prompt_scores for e in mine if e.prompt_scores is not None]
        assert len(prompt) == 1 and len(prompt[0].logprobs) == len(PROMPT) - 1
        assert len(generation.prompt_logprobs) == len(PROMPT)


@pytest.mark.parametrize(
    ("params", "asked"),
    [
        ({"top_k": 1}, LogprobParams(kind="truncated", top_logprobs_num=20)),
        ({"top_k": 1}, LogprobParams(logprob_start_len=0, top_logprobs_num=20)),
        ({"logit_bias": dict.fromkeys(range(500), -100.0)}, TOP),
        ({"min_new_tokens": 4, "stop_token_ids": (1, 2, 3)}, TOP),
        ({"top_p": 1e-6, "temperature": 1e-4}, LogprobParams(kind="truncated", top_logprobs_num=3)),
        ({"temperature": 1e4}, TOP),
    ],
)
def test_b55_impossible_tokens_have_a_legal_value(engine, params, asked):
    """sglang #5984, vllm #10234: minus infinity is not legal JSON. NaN never appears at all."""
    sampling = SamplingParams(max_new_tokens=5, sampling_seed=1, **params)
    [generation] = engine.generate(PROMPT, sampling, logprobs=asked)
    assert all(math.isfinite(x) for x in generation.logprobs)
    rows = [[x for _, x in row] for row in generation.top_logprobs]
    rows += [*generation.id_logprobs, [x for x in generation.prompt_logprobs if x is not None]]
    assert not any(math.isnan(x) or x > 1e-6 for row in rows for x in row)
    reply = generate_reply(generation, label="x", logprobs=asked)
    text = json.dumps(reply, allow_nan=False)
    if params.get("top_k") == 1 and asked.kind == "truncated":
        assert [x for x in rows[0] if math.isfinite(x)] == [0.0]
        assert "null" in text


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}],
)
def test_b57_the_reported_support_is_the_one_that_was_drawn_from(
    llama_folder, llama_oracle, params
):
    """sglang #27408, #33593: the mask was rebuilt after the draw. (Frequencies: tests/kernels.)"""
    harness = engine_of(llama_folder)
    asked = LogprobParams(kind="truncated", top_logprobs_num=60)
    params = params | {"max_new_tokens": 12, "temperature": 1.4}
    for seed in range(8):
        harness.add(PROMPT, logprobs=asked, sampling_seed=seed, **params)
    sizes = set()
    for request_id, output in harness.run().items():
        all_params = params | {"sampling_seed": request_id}
        check_output(output, PROMPT, all_params, llama_oracle, logprobs=asked)
        for token_id, logprob, (ids, values) in zip(
            output.token_ids, output.logprobs, output.top, strict=True
        ):
            support = {i: x for i, x in zip(ids, values, strict=True) if math.isfinite(x)}
            sizes.add(len(support))
            assert support[token_id] == pytest.approx(logprob, abs=1e-6)
            assert sum(map(math.exp, support.values())) == pytest.approx(1.0, abs=1e-4)
            assert len(support) <= params.get("top_k", 320)
    assert len(sizes) > 1 or "top_k" in params


def test_logprobs_of_a_row_do_not_depend_on_the_samplers_other_rows(llama_folder, llama_oracle):
    """A plain row beside truncating, penalised, biased and raw ones is as it is alone."""
    plain = {"max_new_tokens": 24, "temperature": 1.0, "sampling_seed": 9, "ignore_eos": True}
    want = engine_of(llama_folder).ask(PROMPT, **plain)
    others = [
        ({"top_p": 0.8}, None),
        ({"repetition_penalty": 1.3}, None),
        ({"logit_bias": {5: 9.0}}, None),
        ({}, LogprobParams(kind="raw", top_logprobs_num=3)),
        ({"top_k": 4}, LogprobParams(kind="truncated")),
        ({"temperature": 0.0, "presence_penalty": 1.0}, None),
    ]
    for params, asked in others:
        among = engine_of(llama_folder)
        for _ in range(2):
            among.add(PROMPT, logprobs=asked, max_new_tokens=30, **params)
        got = among.ask(PROMPT, **plain)
        assert got.token_ids == want.token_ids
        assert_logprobs(got.logprobs, want.logprobs, 1e-5)
    check_output(want, PROMPT, plain, llama_oracle)
    assert np.isfinite(follow(llama_oracle, PROMPT, want, plain).gaps).all()


@pytest.mark.parametrize("max_new_tokens", [0, 3])
def test_prompt_scores_leave_once_though_rows_leave_before(
    max_new_tokens, qwen3_moe_folder, qwen3_moe_oracle
):
    """Rows of a prompt in chunks may leave before all its scores are there; they came twice."""
    harness = Harness(
        qwen3_moe_folder, dtype="float32", page_size=4, chunk_size=8, capture=("experts",)
    )
    prompt = list(range(3, 43))
    params = {"max_new_tokens": max_new_tokens, "sampling_seed": 1, "ignore_eos": True}
    scored = LogprobParams(logprob_start_len=0)
    output = harness.ask(
        prompt,
        logprobs=scored,
        capture=CaptureParams(columns=("experts",), interval=4),
        **params,
    )
    assert output.num_events > 2
    check_prompt_scores(output, prompt, params, scored, qwen3_moe_oracle)
