"""The engine gives the oracle's tokens and logprobs, whatever the schedule was.

The oracle forwards everything again for each token, one request at a time, and shares no code with
the engine. So chunking, paging, batching, caching, overlap and retraction must all be invisible.
"""

import numpy as np
import pytest

from tests.support.compare import assert_logprobs, assert_same_tokens
from tests.support.harness import Harness
from tests.support.pairwise import all_pairs, label, product

AXES = {
    "model": ["llama", "qwen3_moe", "tiny_moe"],
    "sampling": ["greedy", "seeded"],
    "depth": [0, 1, 2],
    "page_size": [1, 16],
    "chunk_size": [1, 7, 64, -1],
    "batch": ["alone", "mixed"],
    "prefix": ["miss", "hit", "off"],
    "memory": ["ample", "tight", "retract"],
}
CONTEXT_LEN = 80
PROMPT_LENS = (5, 17, 33, 32, 1, 48)
OUTPUT_LENS = (20, 24, 9, 16, 30, 24)
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


def _requests(case: dict, vocab_size: int) -> list[tuple[list[int], dict]]:
    """Six requests; the second half shares a prefix of 24 tokens with the first."""
    rng = np.random.default_rng(7)
    shared = rng.integers(3, vocab_size, 24).tolist()
    requests = []
    for i, (prompt_len, output_len) in enumerate(zip(PROMPT_LENS, OUTPUT_LENS, strict=True)):
        prompt = rng.integers(3, vocab_size, prompt_len).tolist()
        if prompt_len > 24:
            prompt[:24] = shared
        params = SAMPLING[case["sampling"]][i % len(SAMPLING[case["sampling"]])]
        params = params | {"max_new_tokens": output_len, "sampling_seed": 2**63 + i}
        requests.append((prompt, params))
    return requests


def check_case(case: dict, folder, oracle) -> None:
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
        context_len=CONTEXT_LEN,
        max_running=8,
    )
    requests = _requests(case, harness.config.model.vocab_size)
    if case["prefix"] == "hit":
        for prompt, params in requests:
            harness.add(prompt, **params)
        harness.run()
    if case["memory"] == "retract":
        retract_at = {3, 7, 8, 15, 16, 17, 40, 100, 230}  # sparser and sparser: all must end
        harness.on_step = lambda n: n in retract_at and harness.scheduler.retract_last()
    ids = []
    for prompt, params in requests:
        ids.append(harness.add(prompt, **params))
        if case["batch"] == "alone":
            harness.run()
    outputs = harness.run()
    usages = [outputs[i].usage for i in ids]
    if case["memory"] == "retract":
        assert sum(u.num_retractions for u in usages), "nothing was retracted"
    if case["prefix"] == "hit" and case["memory"] == "ample":
        assert all(u.cached_tokens >= u.prompt_tokens - 16 for u in usages), usages
    if case["prefix"] == "off":
        assert not any(u.cached_tokens for u in usages)
    for request_id, output in outputs.items():
        prompt, params = requests[request_id % len(requests)]
        check_output(output, prompt, params, oracle)


def check_output(output, prompt: list[int], params: dict, oracle, context: str = "") -> None:
    """Compare one output with the oracle's generation."""
    want = oracle.generate(
        prompt,
        **{k: v for k, v in params.items() if k != "sampling_seed"},
        seed=params["sampling_seed"],
        eos_ids=oracle_eos(oracle),
    )
    count = assert_same_tokens(output.token_ids, want, context=context)
    assert_logprobs(output.logprobs[:count], want.logprobs[:count], context=context)
    if count == len(want.token_ids):
        assert output.finish.type == want.finish


def oracle_eos(oracle) -> tuple[int, ...]:
    """End-of-sequence ids as the checkpoint's generation config has them."""
    eos = oracle.model.generation_config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)


@pytest.mark.parametrize("case", all_pairs(AXES), ids=label)
def test_pairwise(case, request):
    """Every two values of two axes meet."""
    check_case(
        case,
        request.getfixturevalue(f"{case['model']}_folder"),
        request.getfixturevalue(f"{case['model']}_oracle"),
    )


@pytest.mark.full
@pytest.mark.parametrize("case", product(AXES), ids=label)
def test_full_product(case, request):
    """Every combination."""
    test_pairwise(case, request)
