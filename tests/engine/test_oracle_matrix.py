"""The engine gives the oracle's tokens and logprobs, whatever the schedule was.

The oracle forwards everything in one piece, one request at a time, and shares no code with the
engine. So chunking, paging, batching, caching, overlap, retraction, sampling parameters of the
neighbours and the policy must all be invisible. Rows of one batch differ in every parameter.
"""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from dovetail.wire.request import LogprobParams
from tests.support.answers import check_output
from tests.support.harness import Harness, Output
from tests.support.oracle import Oracle
from tests.support.pairwise import all_pairs, label, product

SCHEDULE_AXES = {
    "depth": [0, 1, 2],
    "page_size": [1, 16],
    "chunk_size": [1, 7, 64, -1],
    "batch": ["alone", "mixed"],
    "prefix": ["miss", "hit", "off"],
    "memory": ["ample", "tight", "retract"],
    "policy": ["fcfs", "priority", "longest-prefix"],
}
REQUEST_AXES = {
    "model": ["llama", "qwen3_moe", "tiny_moe"],
    "sampling": ["greedy", "seeded"],
    "penalties": ["none", "repetition", "frequency", "presence", "all"],
    "n": [1, 3],
    "kind": ["none", "scaled", "raw", "truncated"],
    "prompt_scores": ["none", "start", "middle", "end"],
}
AXES = REQUEST_AXES | SCHEDULE_AXES
CONTEXT_LEN = 80
PROMPT_LENS = (5, 17, 33, 32, 1, 48)
OUTPUT_LENS = (14, 18, 9, 12, 22, 16)
SAMPLING = {
    "greedy": [{"temperature": 0.0}],
    "seeded": [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
        {"temperature": 0.0},
    ],
}
STOPS = tuple(range(40, 100))
PENALTIES = {
    "none": [{}],
    "repetition": [{"repetition_penalty": 1.3}, {}, {"repetition_penalty": 0.8}, {}],
    "frequency": [{"frequency_penalty": 0.7}, {"frequency_penalty": -0.4}, {}],
    "presence": [{}, {"presence_penalty": 1.5}, {"presence_penalty": -1.0}, {}],
    "all": [
        {
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.5,
            "logit_bias": {7: 4.0, 50: 30.0, 9: -100.0},
            "min_new_tokens": 5,
            "stop_token_ids": STOPS,
        },
        {"min_new_tokens": 6, "stop_token_ids": STOPS[:30], "logit_bias": {45: 20.0}},
        {},
        {"logit_bias": {i: 2.0 - i % 5 for i in range(100, 200)}, "presence_penalty": 0.4},
        {"repetition_penalty": 1.5, "frequency_penalty": -0.1},
    ],
}
ASKED = [
    {"top_logprobs_num": 3, "token_ids_logprob": (5, 300 % 256, 0)},
    {"top_logprobs_num": 1},
    {},
    {"token_ids_logprob": (7, 7)},
    {"top_logprobs_num": 20, "token_ids_logprob": tuple(range(0, 90, 3))},
]

Asked = tuple[list[int], dict, LogprobParams | None]


def _requests(case: dict, vocab_size: int) -> list[Asked]:
    """Six requests, four if each is sampled more than once; three share a prefix of 24."""
    rng = np.random.default_rng(7)
    shared = rng.integers(3, vocab_size, 24).tolist()
    requests = []
    for i, (prompt_len, output_len) in enumerate(zip(PROMPT_LENS, OUTPUT_LENS, strict=True)):
        prompt = rng.integers(3, vocab_size, prompt_len).tolist()
        if prompt_len > 24:
            prompt[:24] = shared
        choices = SAMPLING[case["sampling"]], PENALTIES[case["penalties"]]
        params = {name: value for rows in choices for name, value in rows[i % len(rows)].items()}
        params |= {"max_new_tokens": output_len, "sampling_seed": 2**63 + i, "n": case["n"]}
        requests.append((prompt, params, _logprobs(case, i, prompt_len)))
    return requests[-4:] if case["n"] > 1 else requests


def _logprobs(case: dict, index: int, prompt_len: int) -> LogprobParams | None:
    """What a request asks for: rows of one case differ."""
    kind, where = case["kind"], case["prompt_scores"]
    start = {"none": -1, "start": 0, "middle": prompt_len // 2, "end": prompt_len}[where]
    if index % 3 == 2:
        start = -1
    if kind == "none":
        return None if start < 0 else LogprobParams(logprob_start_len=start)
    if kind == "truncated" and start >= 0:
        kind = "scaled"  # prompts have none
    return LogprobParams(kind=kind, logprob_start_len=start, **ASKED[index % len(ASKED)])


def check_case(case: dict, folder, oracle: Oracle) -> None:
    """Run six requests under one configuration and compare each with the oracle."""
    tight_pages = -(-(CONTEXT_LEN + 16) // case["page_size"])
    harness = Harness(
        folder,
        dtype="float32",
        depth=case["depth"],
        page_size=case["page_size"],
        chunk_size=case["chunk_size"],
        num_pages=tight_pages if case["memory"] == "tight" else 1024,
        prefix_cache=case["prefix"] != "off",
        policy=case["policy"],
        context_len=CONTEXT_LEN,
        max_running=8,
    )
    requests = _requests(case, harness.config.model.vocab_size)
    if case["prefix"] == "hit":
        for prompt, _, _ in requests:
            harness.add(prompt, max_new_tokens=1)
        harness.run()
    num_warm = len(harness.outputs)
    if case["memory"] == "retract":
        retract_at = {3, 7, 8, 15, 16, 17, 40, 100, 230}  # sparser and sparser: all must end
        first = harness.num_steps
        harness.on_step = lambda n: n - first in retract_at and harness.scheduler.retract_last()
    for i, (prompt, params, logprobs) in enumerate(requests):
        harness.add(prompt, logprobs=logprobs, priority=i % 3, **params)
        if case["batch"] == "alone":
            harness.run()
    harness.run()
    outputs = [output for output, _ in _pairs(harness, requests, num_warm)]
    if case["memory"] == "retract":
        assert sum(o.usage.num_retractions for o in outputs), "nothing was retracted"
    for output, request in _pairs(harness, requests, num_warm):
        _check_cached(output, request, case)
    for request_id in range(num_warm, len(harness.outputs)):
        for sample_index, output in enumerate(harness.samples[request_id]):
            prompt, params, logprobs = requests[request_id - num_warm]
            check_output(
                output, prompt, params, oracle, logprobs=logprobs, sample_index=sample_index
            )


def _pairs(
    harness: Harness, requests: list[Asked], num_warm: int
) -> Iterator[tuple[Output, Asked]]:
    for index, request in enumerate(requests):
        for output in harness.samples[num_warm + index]:
            yield output, request


def _check_cached(output: Output, request: Asked, case: dict) -> None:
    prompt, _, logprobs = request
    cached, start = (
        output.usage.cached_tokens,
        -1 if logprobs is None else logprobs.logprob_start_len,
    )
    most = len(prompt) - 1
    if 0 <= start < len(prompt):
        most = min(most, max(start - 1, 0))
    assert cached <= most
    if case["prefix"] == "hit" and case["memory"] == "ample":
        assert cached > most - case["page_size"], (cached, most)
    if case["prefix"] == "off":
        assert not cached


def _with_others(cases: list[dict], axes: dict) -> list[dict]:
    """Add to each case values of other axes, chosen by its number."""
    return [
        case | {name: random.Random(f"{number} {name}").choice(axes[name]) for name in axes}
        for number, case in enumerate(cases)
    ]


@pytest.mark.parametrize("case", all_pairs(AXES), ids=label)
def test_pairwise(case, request):
    """Every two values of two axes meet."""
    check_case(
        case,
        request.getfixturevalue(f"{case['model']}_folder"),
        request.getfixturevalue(f"{case['model']}_oracle"),
    )


@pytest.mark.full
@pytest.mark.parametrize("case", _with_others(product(SCHEDULE_AXES), REQUEST_AXES), ids=label)
def test_every_schedule(case, request):
    """Every combination of what decides the schedule, with requests by chance."""
    test_pairwise(case, request)


@pytest.mark.full
@pytest.mark.parametrize("case", _with_others(product(REQUEST_AXES), SCHEDULE_AXES), ids=label)
def test_every_request(case, request):
    """Every combination of what is asked for, with a schedule by chance."""
    test_pairwise(case, request)
