"""A long queue costs nothing, and what has ended leaves nothing behind.

Costs are counted, not timed: Python lines that the package executes while it plans.
"""

import gc
import sys
from collections.abc import Callable

import numpy as np
import pytest

from dovetail.exec.fake import FakeExecutor
from dovetail.sched.policy import WINDOW
from dovetail.sched.sequence import Sequence
from tests.support.referee import check_nothing_kept
from tests.support.scripted import plain_config
from tests.support.scripted_engine import no_end, scripted_engine
from tests.support.stepper import Stepper

POLICIES = ("fcfs", "priority", "longest-prefix")


def count_lines(call: Callable[[], object]) -> int:
    """Return how many lines of the package a call executes."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if "dovetail" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return lines


def fill(engine: Stepper, num_requests: int) -> None:
    for i in range(num_requests):
        engine.add([3 + i % 29, 3 + i // 29 % 29, 5, 6, 7], max_new_tokens=30, ignore_eos=True)
    for message in engine.inbox.take(wait=False):
        engine.loop.apply(message)


def busy_engine(policy: str, *, num_running: int, num_waiting: int, **options: object) -> Stepper:
    defaults = {"context_len": 40, "num_pages": 400, "chunk_size": 64, "depth": 1}
    engine = scripted_engine(policy=policy, max_running=num_running, **(defaults | options))
    fill(engine, num_running)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.num_running == num_running
    fill(engine, num_waiting)
    return engine


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_engine_does_not_notice_its_queue(policy):
    """No slot is free: planning is the same with nobody waiting and with ten thousand."""
    alone = busy_engine(policy, num_running=8, num_waiting=0)
    queued = busy_engine(policy, num_running=8, num_waiting=10_000)
    costs = [count_lines(engine.scheduler.plan) for engine in (alone, queued)]
    assert costs[1] <= costs[0] + 5, costs


@pytest.mark.parametrize("policy", POLICIES)
def test_starting_one_costs_the_same_whatever_the_queue(policy):
    """A slot is free: as many are looked at as the window holds, and no more."""
    costs = []
    for num_waiting in (2 * WINDOW, 10_000):
        engine = busy_engine(policy, num_running=8, num_waiting=num_waiting)
        engine.scheduler.abort(0)
        engine.step()
        engine.step()
        engine.scheduler.abort(1)
        while engine.scheduler._slots.num_free == 0:  # in flight
            pending = engine.loop.inflight.popleft()
            engine.outbox.put(engine.scheduler.commit(pending.plan, pending.result()))
        costs.append(count_lines(engine.scheduler.plan))
    assert abs(costs[1] - costs[0]) <= 0.05 * costs[0], costs


@pytest.mark.parametrize("policy", POLICIES)
def test_short_memory_is_asked_for_once(policy):
    """Nobody fits: until somebody leaves, the queue is not looked at again."""
    engine = scripted_engine(
        policy=policy, max_running=8, context_len=40, num_pages=10, chunk_size=64, depth=1
    )
    engine.add([3] * 30, max_new_tokens=9, ignore_eos=True)
    for _ in range(3):
        engine.step()
    alone = count_lines(engine.scheduler.plan)
    engine = scripted_engine(
        policy=policy, max_running=8, context_len=40, num_pages=10, chunk_size=64, depth=1
    )
    engine.add([3] * 30, max_new_tokens=9, ignore_eos=True)
    for i in range(10_000):
        engine.add([4 + i % 20] * 30, max_new_tokens=9, ignore_eos=True)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.num_running == 1
    assert count_lines(engine.scheduler.plan) <= alone + 5


def test_queueing_and_aborting_in_a_long_queue_is_cheap():
    engine = busy_engine("priority", num_running=2, num_waiting=10_000)

    def come_and_go() -> None:
        fill(engine, 1)
        engine.scheduler.abort(len(engine.outputs) - 1)
        engine.scheduler.abort(5_000)

    assert count_lines(come_and_go) < 600


@pytest.mark.parametrize("policy", ["longest-prefix"])
def test_two_thousand_requests_leave_nothing_behind(policy):
    """Finished, aborted, in groups, with samples: no container grows, no sequence stays."""
    config = plain_config(
        context_len=40, page_size=4, num_pages=60, chunk_size=16, max_running=8, policy=policy
    )
    device = FakeExecutor(no_end, num_slots=config.max_running, page_size=config.page_size)
    engine = Stepper(config, device, token_bytes=lambda _: b"x")
    rng = np.random.default_rng(3)
    gc.collect()
    num_before = count_sequences()
    shared = rng.integers(3, 30, 20).tolist()
    added = 0
    check, engine.ledger.check = engine.ledger.check, lambda: None  # quick; checked at the end
    while added < 2_000 or engine.scheduler.num_open or engine.loop.inflight:
        if added < 2_000 and engine.scheduler.num_open < 20:
            engine.add(
                shared[: rng.integers(1, 20)] + rng.integers(3, 30, rng.integers(1, 4)).tolist(),
                max_new_tokens=int(rng.integers(0, 6)),
                n=int(rng.integers(1, 3)),
                stop="xxxx" if rng.random() < 0.3 else None,
                group=str(rng.integers(5)) if rng.random() < 0.5 else None,
                capture=("tokens",) if rng.random() < 0.2 else (),
                priority=int(rng.integers(3)),
            )
            added += 1
        if rng.random() < 0.05:
            engine.abort(int(rng.integers(added)))
        if rng.random() < 0.01:
            engine.abort_group(str(rng.integers(5)))
        if rng.random() < 0.02:
            engine.scheduler.retract_last()
        engine.loop.step()
    check()
    check_nothing_kept(engine.scheduler)
    assert not engine.outbox._streams and not engine.outbox._num_open
    assert not engine.ledger._holdings
    assert len(list(engine.ledger._tree.nodes())) <= config.num_pages
    engine.check_idle()
    gc.collect()
    assert count_sequences() == num_before


def count_sequences() -> int:
    return sum(type(thing) is Sequence for thing in gc.get_objects())
