"""Reported bugs of other engines that show at length or in company; others are in traffic.

Tests are named by the ids of ``docs/testing.md``, where all of them are listed.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dovetail.wire.request import LogprobParams
from tests.support.figures import Figure
from tests.support.gpu_engine import gpu_harness
from tests.support.oracle import Oracle
from tests.support.stepper import Output, Stepper
from tests.support.traffic import CROWD, Asked, check_rows, logprob_errors, num_ties

pytestmark = pytest.mark.cuda

ROWS = ("experts",)
PARAMS = {"temperature": 1.0}


def crowd(harness: Stepper, num_requests: int, *, seed: int) -> list[Asked]:
    """Run requests that come as others go, and now and then lose their memory."""
    rng, asked = np.random.default_rng(seed), []
    while len(asked) < num_requests or harness.is_busy:
        room = 9 - harness.scheduler.num_waiting  # what is added waits from the next step on
        for _ in range(min(room, num_requests - len(asked))):
            prompt = rng.integers(3, 2000, rng.integers(1, 45)).tolist()
            params = PARAMS | {
                "sampling_seed": int(rng.integers(2**62)),
                "max_new_tokens": int(rng.integers(1, 25)),
            }
            number = harness.add(prompt, capture=ROWS, ignore_eos=True, **params)
            asked.append((prompt, params, number))
        if rng.random() < 0.15:
            harness.scheduler.retract_last()
        harness.step()
    harness.check_idle()
    return [Asked(prompt, params, harness.outputs[number]) for prompt, params, number in asked]


def replays(folder: Path, asked: list[Asked]) -> Iterator[Output]:
    """Forward the ids of each request in one prefill, alone on its lane."""
    options = {"depth": 0, "graphs": False, "context_len": 128, "num_pages": 400}
    harness = gpu_harness(
        folder, max_running=33, chunk_size=1024, prefix_cache=False, capture=ROWS, **options
    )
    scores = LogprobParams(logprob_start_len=0)
    for start in range(0, len(asked), 500):
        numbers = [
            harness.add(one.ids, max_new_tokens=1, logprobs=scores, capture=ROWS, **PARAMS)
            for one in asked[start : start + 500]
        ]
        outputs = harness.run()
        yield from (outputs[number] for number in numbers)
    harness.close()


def replay_gaps(folder: Path, asked: list[Asked], oracle: Oracle) -> tuple[np.ndarray, list[Asked]]:
    """How far each logprob is from its replay's, and the requests that met a router tie.

    Tokens drawn behind the tie are left out; that it is one is the oracle's word.
    """
    gaps, tied = [], []
    for one, replay in zip(asked, replays(folder, asked), strict=True):
        output, num_new = one.output, len(one.output.token_ids)
        assert output.finish.type == "length" and num_new == one.params["max_new_tokens"]
        theirs = replay.prompt_scores.logprobs[-num_new:]
        rows, other = (np.sort(each.captured["experts"]) for each in (output, replay))
        assert len(rows) == len(one.ids) - 1
        differ = (rows != other[: len(rows)]).any(axis=(1, 2)).nonzero()[0]
        if len(differ):
            tied.append(one)
            num_new = max(0, int(differ[0]) - len(one.prompt) + 1)
        gaps.append(np.subtract(output.logprobs[:num_new], theirs[:num_new]))
    oracle.prepare([one.ids for one in tied], device="cuda")
    for one in tied:
        check_rows(one, oracle)
    return np.abs(np.concatenate(gaps)), tied


def test_b21_ten_thousand_requests_replay_themselves(tiny_moe_folder, figure: Figure) -> None:
    """sglang #26380, #29353: tables written while the forward before still reads them.

    Overlap's logprobs are as far from a replay as those of a run without overlap, and none is far.
    """
    oracle, found, noise = Oracle(tiny_moe_folder, experts="eager"), [], []
    for num_requests, depth, gaps in ((10_000, 1, found), (1_000, 0, noise)):
        harness = gpu_harness(tiny_moe_folder, depth=depth, capture=ROWS, **CROWD)
        asked = crowd(harness, num_requests, seed=7 + depth)
        harness.close()
        num_retractions = sum(one.output.usage.num_retractions for one in asked)
        assert num_retractions > num_requests / 20
        some, tied = replay_gaps(tiny_moe_folder, asked, oracle)
        assert len(tied) < num_requests / 100
        gaps += some.tolist()
        figure(
            f"{num_requests:,} requests replayed, depth {depth}", float(some.max()),
            "largest difference of a logprob", shape="tiny-moe float32", batch=33,
            tokens=len(some), retractions=num_retractions, router_ties=len(tied),
            p50_p90_p99_p999=np.quantile(some, [0.5, 0.9, 0.99, 0.999]).tolist(),
        )  # fmt: skip
    assert len(found) > 100_000 and max(found) < 1e-4
    for quantile in (0.5, 0.9, 0.99, 0.999):
        assert np.quantile(found, quantile) <= 1.5 * np.quantile(noise, quantile)


def test_b31_concurrency_overlap_and_chunks_change_no_token(tiny_moe_folder) -> None:
    """TensorRT-LLM #4037, sglang #1434: quality fell at large batch with overlap and chunks."""
    rng, greedy = np.random.default_rng(9), {"temperature": 0.0, "sampling_seed": 0}
    prompts = [rng.integers(3, 2000, rng.integers(5, 60)).tolist() for _ in range(200)]
    answers = {}
    for cell in [(n, depth, chunk) for n in (1, 8, 64) for depth in (0, 1) for chunk in (-1, 16)]:
        max_running, depth, chunk_size = cell
        harness = gpu_harness(
            tiny_moe_folder, max_running=max_running, depth=depth, chunk_size=chunk_size,
            context_len=128, num_pages=600, prefix_cache=False,
        )  # fmt: skip
        for prompt in prompts:
            harness.add(prompt, max_new_tokens=8, ignore_eos=True, **greedy)
        answers[cell] = list(harness.run().values())
        harness.close()
    first = answers[1, 0, -1]
    for cell, outputs in answers.items():
        other = [i for i in range(200) if outputs[i].token_ids != first[i].token_ids]
        at_once = [i for i in other if outputs[i].token_ids[0] != first[i].token_ids[0]]
        assert len(other) <= 3 and len(at_once) <= 1, (cell, other, at_once)
    oracle = Oracle(tiny_moe_folder, experts="eager")
    for outputs in (first, answers[64, 1, 16]):
        asked = [Asked(*pair) for pair in zip(prompts, [greedy] * 200, outputs, strict=True)]
        oracle.prepare([one.ids for one in asked], device="cuda")
        assert logprob_errors(asked, oracle).max() < 1e-4
        assert num_ties(asked, oracle, eos_ids=()) < 6
