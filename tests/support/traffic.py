"""Mixed traffic: bursts, shared prefixes, all ways to draw, aborts, retractions; checked by replay.

The same arrivals for the same seed; what is aborted and retracted when depends on the turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.compare import (
    ROUTER_NOISE,
    SCORE_NOISE,
    assert_follows,
    assert_same_routes,
)
from tests.support.harness import Harness
from tests.support.oracle import Oracle, Routing
from tests.support.stepper import Output, Stepper

CROWD: dict[str, Any] = {"context_len": 128, "num_pages": 96, "max_running": 33, "chunk_size": 96}
"""Room for about half of those that run, so memory is taken all the time."""
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 0.9, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.9},
)
PLAIN = 4
"""The first so many of ``DRAWS`` are what a graph draws."""


@dataclass(frozen=True)
class Asked:
    """One request, and what it got.

    Attributes:
        params: fields of ``SamplingParams``.
    """

    prompt: list[int]
    params: dict[str, Any]
    output: Output

    @property
    def ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt, *self.output.token_ids]


def mixed_traffic(
    harness: Stepper,
    num_requests: int,
    *,
    seed: int,
    draws: Sequence[dict[str, Any]] = DRAWS,
    capture: tuple[str, ...] = (),
    max_prompt_len: int = 64,
    max_new_tokens: int = 30,
    disturbed: bool = True,
) -> list[Asked]:
    """Run requests to their ends and return them; ``disturbed``: with aborts and retractions."""
    rng = np.random.default_rng(seed)
    vocab_size = harness.config.model.vocab_size
    shared = [rng.integers(3, vocab_size, 20).tolist() for _ in range(4)]
    asked: list[tuple[list[int], dict[str, Any], int]] = []
    while len(asked) < num_requests or harness.is_busy:
        burst = int(rng.choice([0, 0, 0, 1, 2, 9])) if len(asked) < num_requests else 0
        for _ in range(min(burst, num_requests - len(asked))):
            prompt = rng.integers(3, vocab_size, rng.integers(1, max_prompt_len - 19)).tolist()
            if rng.random() < 0.4:
                prompt = shared[rng.integers(4)] + prompt
            params = draws[rng.integers(len(draws))] | {
                "max_new_tokens": int(rng.integers(0, max_new_tokens + 1)),
                "sampling_seed": int(rng.integers(2**62)),
            }
            asked.append((prompt, params, harness.add(prompt, capture=capture, **params)))
        if disturbed and asked and rng.random() < 0.04:
            harness.abort(asked[rng.integers(max(0, len(asked) - 40), len(asked))][2])
        if disturbed and rng.random() < 0.15:
            harness.scheduler.retract_last()
        harness.step()
    harness.check_idle()
    outputs = harness.outputs
    return [Asked(prompt, params, outputs[number]) for prompt, params, number in asked]


def fill_a_page_with_nan(harness: Harness, number: int) -> None:
    """Spoil the keys of a running request's second page, as work of the compute lane."""
    running = harness.scheduler._running
    page = next(s for s in running if s.request.request_id == number).holding.tables[0][1]
    size = harness.config.page_size
    keys = harness.executor._runner._kv.k_LCKD[:, page * size : (page + 1) * size]
    harness.executor._device.compute.submit(keys.fill_, float("nan"))


def check_pool_is_whole(harness: Stepper) -> None:
    """Everything is free, and a request that needs nearly all of it ends, three times."""
    longest = min(harness.config.context_len, harness.config.num_pages * harness.config.page_size)
    for _ in range(3):
        harness.ledger.flush()
        stats = harness.ledger.stats()
        assert stats.free == stats.total == harness.config.num_pages
        output = harness.ask([5] * (longest - 3), max_new_tokens=3, ignore_eos=True)
        assert output.finish is not None and output.finish.type == "length"


def logprob_errors(asked: Sequence[Asked], oracle: Oracle) -> np.ndarray:
    """Return, of every token of every output, how far its logprob is from a forward's.

    Where temperature enlarges an error of a logit, the distance is that of the logits.
    """
    errors = [np.zeros(0)]
    for one in asked:
        assert one.output.finish is not None and one.output.finish.type != "error", one
        temperature = one.params["temperature"] or 1.0
        want = oracle.score(one.prompt, one.output.token_ids, temperature)
        errors.append(np.abs(one.output.logprobs - want) * min(temperature, 1.0))
    return np.concatenate(errors)


def num_ties(
    asked: Sequence[Asked],
    oracle: Oracle,
    *,
    eos_ids: Sequence[int],
    noise: float = SCORE_NOISE,
    router_noise: float = ROUTER_NOISE,
) -> int:
    """Check that each output follows the oracle token for token; return the ties on the way."""
    ties = 0
    for number, one in enumerate(asked):
        params = {name: v for name, v in one.params.items() if name != "max_new_tokens"}
        want = oracle.follow(
            one.prompt, one.output.token_ids, seed=params.pop("sampling_seed"),
            eos_ids=eos_ids, **params,
        )  # fmt: skip
        ties += len(
            assert_follows(
                one.output.token_ids, want, noise=noise, router_noise=router_noise,
                context=f"request {number} of {len(asked)}",
            )
        )  # fmt: skip
    return ties


def check_rows(one: Asked, oracle: Oracle, *, noise: float = ROUTER_NOISE) -> int:
    """Compare the expert rows of a request with a teacher-forced forward; return their number.

    The oracle is asked for prompt and output as a whole, so it can have been prepared.
    """
    got, finish = one.output.captured.get("experts"), one.output.finish
    assert finish is not None and finish.type != "error", finish
    num_forwarded = len(one.prompt) + max(len(one.output.token_ids) - 1, 0)
    num_rows = 0 if got is None else len(got)
    if finish.type == "abort" and not one.output.token_ids:
        assert num_rows <= num_forwarded  # some of the prompt, or nothing
    else:
        assert num_rows == num_forwarded
    if got is None or not num_rows:
        return 0
    want = oracle.router_ids(one.ids)
    assert_same_routes(got, Routing(*(part[:num_rows] for part in want)), noise=noise)
    assert (np.diff(np.sort(got, axis=-1)) > 0).all(), "an expert twice in a row"
    return num_rows
