"""A group of equal prompts computes its prefix once, whoever of it ends early."""

import pytest

from dovetail.wire.request import LogprobParams
from tests.support.scripted_engine import scripted_engine
from tests.support.stepper import Stepper

PROMPT_LEN, OUTPUT_LEN, GROUP_SIZE, CHUNK = 500, 8, 16, 128
PROMPT = [3 + i * i % 29 for i in range(PROMPT_LEN)]
SAMPLING = {"max_new_tokens": OUTPUT_LEN, "ignore_eos": True}

each_shape = pytest.mark.parametrize(
    ("depth", "page_size"), [(d, p) for d in (0, 1, 2) for p in (1, 16)]
)


def engine_of(*, depth: int, page_size: int, chunk_size: int = CHUNK, **options: object) -> Stepper:
    return scripted_engine(
        context_len=512,
        page_size=page_size,
        num_pages=4 * 512 // page_size,
        chunk_size=chunk_size,
        max_running=GROUP_SIZE,
        depth=depth,
        **options,
    )


def tail_len(page_size: int) -> int:
    """Tokens of the prompt that each sequence has to forward itself."""
    return PROMPT_LEN - (PROMPT_LEN - 1) // page_size * page_size


def least_forwarded(page_size: int, num_sequences: int = GROUP_SIZE) -> int:
    """One prefill, a tail for each other sequence, and all outputs but their last tokens."""
    tails = (num_sequences - 1) * tail_len(page_size)
    return PROMPT_LEN + tails + num_sequences * (OUTPUT_LEN - 1)


@each_shape
@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest-prefix"])
def test_a_group_costs_one_prefill_and_tails(depth, page_size, policy):
    engine = engine_of(depth=depth, page_size=page_size, policy=policy)
    for _ in range(GROUP_SIZE):
        engine.add(PROMPT, **SAMPLING)
    outputs = engine.run()
    assert engine.num_forwarded == least_forwarded(page_size)
    cached = [output.usage.cached_tokens for output in outputs.values()]
    assert cached == [0] + [PROMPT_LEN - tail_len(page_size)] * (GROUP_SIZE - 1)


@each_shape
def test_samples_of_one_request_share_its_prefill(depth, page_size):
    engine = engine_of(depth=depth, page_size=page_size)
    request_id = engine.add(PROMPT, n=GROUP_SIZE, **SAMPLING)
    engine.run()
    assert engine.num_forwarded == least_forwarded(page_size)
    assert len({tuple(o.token_ids) for o in engine.samples[request_id]}) == GROUP_SIZE


def test_without_a_cache_nobody_waits():
    engine = engine_of(depth=1, page_size=16, prefix_cache=False)
    for _ in range(GROUP_SIZE):
        engine.add(PROMPT, **SAMPLING)
    engine.run()
    assert engine.num_forwarded == GROUP_SIZE * (PROMPT_LEN + OUTPUT_LEN - 1)


@each_shape
@pytest.mark.parametrize("abort_after", [1, 2, 5])
def test_if_the_leader_is_aborted_the_next_takes_over(depth, page_size, abort_after):
    engine = engine_of(depth=depth, page_size=page_size)
    ids = [engine.add(PROMPT, **SAMPLING) for _ in range(GROUP_SIZE)]
    for _ in range(abort_after):
        engine.step()
    engine.abort(ids[0])
    outputs = engine.run()
    assert {outputs[i].finish.type for i in ids[1:]} == {"length"}
    # What was in flight when it ended is lost, and no more than that.
    lost = (depth + 1) * CHUNK + page_size
    assert engine.num_forwarded <= least_forwarded(page_size) + lost


@each_shape
@pytest.mark.parametrize("retract_after", [1, 3, 5])
def test_if_the_leader_is_retracted_nobody_hangs(depth, page_size, retract_after):
    engine = engine_of(depth=depth, page_size=page_size)
    for _ in range(GROUP_SIZE):
        engine.add(PROMPT, **SAMPLING)
    for _ in range(retract_after):
        engine.step()
    engine.scheduler.retract_last()
    outputs = engine.run()
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 1
    lost = (depth + 1) * CHUNK + PROMPT_LEN % page_size + OUTPUT_LEN + page_size
    assert engine.num_forwarded <= least_forwarded(page_size) + lost


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_each_leader_in_turn_is_aborted(depth):
    """One after the other ends while it computes the prefix; the last one gets its answer."""
    engine = engine_of(depth=depth, page_size=16)
    ids = [engine.add(PROMPT, **SAMPLING) for _ in range(GROUP_SIZE)]
    for request_id in ids[:-1]:
        engine.step()
        engine.abort(request_id)
    outputs = engine.run()
    assert outputs[ids[-1]].finish.type == "length"


def test_who_is_held_does_not_hold_up_others():
    engine = engine_of(depth=1, page_size=16, chunk_size=300)
    for _ in range(4):
        engine.add(PROMPT, **SAMPLING)
    other = engine.add([4] * 20, **SAMPLING)
    engine.step()
    engine.step()
    running = {sequence.request.request_id for sequence in engine.scheduler._running}
    assert running == {0, other}
    engine.run()


def test_only_shared_full_pages_are_worth_waiting_for():
    """Prompts that differ within the first page start together."""
    engine = engine_of(depth=1, page_size=16)
    for i in range(4):
        engine.add([3 + i, *PROMPT[:25]], **SAMPLING)
    engine.step()
    assert engine.scheduler.num_running == 4
    engine.run()


@each_shape
def test_a_longer_prompt_waits_for_the_part_that_it_shares(depth, page_size):
    engine = engine_of(depth=depth, page_size=page_size)
    engine.add(PROMPT[:400], **SAMPLING)
    engine.add([*PROMPT[:300], *range(3, 30)], **SAMPLING)
    outputs = engine.run()
    assert outputs[1].usage.cached_tokens == 300 // page_size * page_size


def test_whose_logprobs_are_asked_for_does_not_wait_for_what_it_cannot_use():
    """A prompt scored from its beginning has no hit, so there is nothing to wait for."""
    engine = engine_of(depth=1, page_size=16)
    for _ in range(3):
        engine.add(PROMPT, logprobs=LogprobParams(logprob_start_len=0), **SAMPLING)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.num_waiting == 0 or engine.scheduler.num_running > 1
    engine.run()
    assert engine.num_forwarded == 3 * (PROMPT_LEN + OUTPUT_LEN - 1)
