"""Every expert row of every request is that of an independent forward, whatever the schedule was.

Overlap, chunks, pages, prefix hits, retractions, aborts and several samples, mixed: over 500
requests. Rows may differ only where the router's choice is nearer to another than rounding is.
Half of the requests ask for the weights of their experts as well.
"""

from collections import Counter

import numpy as np
import pytest

from dovetail.wire.request import CaptureParams
from tests.support.harness import Harness
from tests.support.pairwise import all_pairs, label, product
from tests.support.routes import check_routes

AXES = {
    "depth": [0, 1, 2],
    "chunk_size": [1, 5, 16, -1],
    "page_size": [1, 4, 16],
    "prefix_cache": [True, False],
    "retract": ["never", "often", "tight"],
    "abort": [False, True],
    "n": [1, 3],
    "interval": [0, 1, 6],
    "model": ["fx_moe", "qwen3_moe", "fx_moe_wide"],
}
CONTEXT_LEN = 72
NUM_REQUESTS = 30


def make_harness(case: dict, folder) -> Harness:
    pages = -(-CONTEXT_LEN // case["page_size"])
    return Harness(
        folder,
        dtype="float32",
        depth=case["depth"],
        chunk_size=case["chunk_size"],
        page_size=case["page_size"],
        num_pages=pages if case["retract"] == "tight" else 16 * pages,
        prefix_cache=case["prefix_cache"],
        context_len=CONTEXT_LEN,
        max_running=6,
        capture=("experts", "expert_weights"),
    )


def run_mixed(case: dict, folder, oracle) -> Counter[str]:
    """Random arrivals, some sharing a prefix, some following up on an answer."""
    harness, rng = make_harness(case, folder), np.random.default_rng(5)
    shared = rng.integers(3, 250, 21).tolist()
    arrivals = 1.0 if case["retract"] == "tight" else 0.5
    asked: dict[int, tuple[list[int], int]] = {}
    while len(asked) < NUM_REQUESTS or harness.is_busy:
        if len(asked) < NUM_REQUESTS and rng.random() < arrivals:
            prompt = rng.integers(3, 250, rng.integers(1, 22)).tolist()
            if rng.random() < 0.5:
                prompt = shared[: rng.integers(4, 22)] + prompt
            ended = [i for i in asked if harness.outputs[i].finish and harness.outputs[i].token_ids]
            if ended and rng.random() < 0.3:
                before = int(rng.choice(ended))
                prompt = [*asked[before][0], *harness.outputs[before].token_ids, 7][:44]
            start = int(rng.integers(0, len(prompt) + 1)) if rng.random() < 0.3 else 0
            capture = CaptureParams(
                columns=("experts", "expert_weights")[: 1 + len(asked) % 2],
                start_len=start,
                interval=case["interval"],
            )
            request_id = harness.add(
                prompt,
                capture=capture,
                temperature=float(rng.choice([0.0, 1.0])),
                max_new_tokens=int(rng.integers(0, 28)),
                sampling_seed=int(rng.integers(2**62)),
                n=case["n"] if rng.random() < 0.4 else 1,
                stop_token_ids=tuple(rng.integers(3, 250, 4).tolist()),
            )
            asked[request_id] = prompt, start
        if case["abort"] and asked and rng.random() < 0.06:
            harness.abort(int(rng.integers(len(asked))))
        if case["retract"] == "often" and rng.random() < 0.08:
            harness.scheduler.retract_last()
        if harness.is_busy:
            harness.scheduler._lengths.share = 0.0  # admits too many where memory is short
            harness.step()
    harness.check_idle()
    seen: Counter[str] = Counter()
    borders = {"page": case["page_size"], "chunk": max(case["chunk_size"], 2)}
    for request_id, (prompt, start) in asked.items():
        for index, output in enumerate(harness.samples[request_id]):
            check_routes(
                output,
                prompt,
                oracle,
                start=start,
                borders=borders,
                seen=seen,
                context=f"request {request_id}, sample {index}, {len(prompt)} tokens",
            )
            seen["requests"] += 1
            seen["retractions"] += output.usage.num_retractions
            seen[output.finish.type] += 1
            seen["cached"] += output.usage.cached_tokens > 0
            seen["recomputed"] += sum(s.num_recomputed > 0 for s in output.spans["experts"])
            seen["differing"] += sum(s.num_differing for s in output.spans["experts"])
    return seen


CASES = all_pairs(AXES)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_every_row_is_that_of_a_forward(case, request):
    folder = request.getfixturevalue(f"{case['model']}_folder")
    oracle = request.getfixturevalue(f"{case['model']}_oracle")
    seen = run_mixed(case, folder, oracle)
    print(dict(seen))
    assert seen["requests"] >= NUM_REQUESTS and len(CASES) * NUM_REQUESTS >= 500
    assert seen["unsure"] < 0.002 * seen["rows"]
    for name in ("page", "chunk", "prompt end", "last row"):
        assert seen[name] > 15, name
    assert seen["seam"] > 0 and seen["weights"] > seen["rows"] // 4
    assert seen["cache end"] > 0 or not case["prefix_cache"]
    retractions = seen["retractions"]
    assert {"never": retractions == 0, "often": retractions > 3, "tight": True}[case["retract"]]
    assert (seen["abort"] > 0) == case["abort"]
    # A row that rounding moves is not moved by more than rounding: nearly none.
    assert seen["differing"] <= 0.002 * seen["rows"]


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        case | {"model": "fx_moe"}
        for case in product({name: axis for name, axis in AXES.items() if name != "model"})
    ],
    ids=label,
)
def test_every_schedule(case, request):
    """The full product."""
    test_every_row_is_that_of_a_forward(case, request)
