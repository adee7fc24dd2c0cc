"""Who starts next, who loses its memory, and how many are looked at."""

import pytest

from dovetail.sched.policy import MAX_PASSES, WINDOW
from tests.support.scripted_engine import first_token_order, scripted_engine
from tests.support.stepper import Stepper

SAMPLING = {"max_new_tokens": 4, "ignore_eos": True}
POLICIES = ("fcfs", "priority", "longest-prefix")
PREFIX = [3 + i % 7 for i in range(24)]


def engine_of(policy: str, **options: object) -> Stepper:
    defaults = {"num_pages": 400, "max_running": 1, "chunk_size": 32, "context_len": 40}
    return scripted_engine(policy=policy, **(defaults | options))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_first_come_first_served(depth):
    engine = engine_of("fcfs", depth=depth)
    for i in range(6):
        engine.add([3 + i] * (20 - 3 * i), priority=i, **SAMPLING)
    assert first_token_order(engine, 6) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_higher_priority_first_then_first_come(depth):
    engine = engine_of("priority", depth=depth)
    priorities = [0, 5, -3, 5, 0, 2**31 - 1, -(2**31)]
    for i, priority in enumerate(priorities):
        engine.add([3 + i] * 6, priority=priority, **SAMPLING)
    want = sorted(range(len(priorities)), key=lambda i: (-priorities[i], i))
    assert first_token_order(engine, len(priorities)) == want == [5, 1, 3, 0, 4, 2, 6]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_most_of_its_prompt_cached_first(depth):
    engine = engine_of("longest-prefix", depth=depth)
    engine.add(PREFIX, **SAMPLING)
    engine.run()
    shared = [0, 8, 23, 8, 16, 0]
    ids = [engine.add([*PREFIX[:n], *[20 + i] * 8], **SAMPLING) for i, n in enumerate(shared)]
    order = [i - ids[0] for i in first_token_order(engine, len(ids) + 1) if i >= ids[0]]
    assert order == [2, 4, 1, 3, 0, 5]  # 20, 16, 8, 8, 0 and 0 tokens of full pages


def test_a_priority_that_no_policy_asks_for_changes_nothing():
    for policy in ("fcfs", "longest-prefix"):
        engine = engine_of(policy)
        for i in range(4):
            engine.add([3 + i] * 6, priority=i, **SAMPLING)
        assert first_token_order(engine, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_in_line_loses_its_memory(policy):
    engine = engine_of(policy, max_running=4)
    for i, priority in enumerate((1, 0, 2, 1)):
        engine.add([3 + i] * 6, priority=priority, max_new_tokens=30, ignore_eos=True)
    for _ in range(6):
        engine.step()
    victims = []
    for _ in range(4):
        victims.append(engine.scheduler.retract_last().request.request_id)
    by_priority = [1, 3, 0, 2]
    assert victims == (by_priority if policy == "priority" else [3, 2, 1, 0])
    engine.run()


def test_memory_goes_to_high_priority_even_if_it_came_last():
    """In a pool for one and a half, the important one runs through and the others give way."""
    engine = engine_of("priority", num_pages=15, max_running=4, context_len=40)
    engine.scheduler._lengths.share = 0.0  # admit all at once
    for i in range(3):
        engine.add([3 + i] * 4, max_new_tokens=34, ignore_eos=True)
    for _ in range(3):
        engine.step()
    important = engine.add([9] * 4, priority=1, max_new_tokens=34, ignore_eos=True)
    outputs = engine.run()
    assert outputs[important].usage.num_retractions == 0
    assert sum(output.usage.num_retractions for output in outputs.values()) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_only_a_window_of_the_queue_is_looked_at(policy, monkeypatch):
    engine = engine_of(policy, max_running=3)
    engine.add(PREFIX, **SAMPLING)
    engine.run()
    for i in range(1000):
        engine.add([*PREFIX[: i % 24], 3 + i % 20], **SAMPLING)
    calls = 0
    match_len = engine.ledger.match_len

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return match_len(*args, **kwargs)

    monkeypatch.setattr(engine.ledger, "match_len", counted)
    most = 0
    for _ in range(200):
        is_full = engine.scheduler.num_running == 3
        engine.step()
        if is_full and engine.scheduler.num_running == 3 and policy != "longest-prefix":
            assert calls <= WINDOW
        most, calls = max(most, calls), 0
    assert most <= 2 * WINDOW
    assert policy != "longest-prefix" or most >= WINDOW


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_is_looked_at_while_no_slot_is_free(policy, monkeypatch):
    engine = engine_of(policy, max_running=2, context_len=120, num_pages=100)
    for i in range(50):
        engine.add([3 + i % 20] * 8, max_new_tokens=100, ignore_eos=True)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.num_running == 2
    monkeypatch.setattr(engine.ledger, "match_len", None)  # a call would fail
    for _ in range(20):
        engine.step()


def test_a_hostile_stream_of_hits_starves_nobody():
    """Whoever is preferred, one without a hit starts after ``MAX_PASSES`` others at most."""
    engine = engine_of("longest-prefix", max_running=2)
    engine.add(PREFIX, **SAMPLING)
    engine.run()
    victim = engine.add([29] * 10, **SAMPLING)
    started = 0
    while not engine.outputs[victim].token_ids:
        while engine.scheduler.num_waiting < 8:
            engine.add([*PREFIX, 3 + started % 20], **SAMPLING)
            started += 1
            for message in engine.inbox.take(wait=False):
                engine.loop.apply(message)
        engine.step()
        assert started <= MAX_PASSES + 20, "starved"
    assert started > MAX_PASSES  # they were preferred
    engine.run()


def test_a_hostile_stream_beyond_the_window_starves_nobody():
    """The window is by arrival, so the oldest are always in it."""
    engine = engine_of("longest-prefix", max_running=2)
    engine.add(PREFIX, **SAMPLING)
    engine.run()
    victims = [engine.add([26 + i] * 10, **SAMPLING) for i in range(3)]
    hits = [engine.add([*PREFIX, 3 + i % 20], **SAMPLING) for i in range(300)]
    order = first_token_order(engine, 304)
    assert max(order.index(v) for v in victims) <= MAX_PASSES + 8
    assert set(order[1:9]) <= set(hits)


def test_a_sequence_that_could_not_start_does_not_hold_up_those_behind_it_once_aborted():
    engine = engine_of("fcfs", num_pages=12, max_running=4, page_size=4, context_len=48)
    running = engine.add([5] * 10, max_new_tokens=30, ignore_eos=True)
    engine.step()
    large = engine.add([6] * 30, max_new_tokens=10, ignore_eos=True)
    small = engine.add([7] * 3, max_new_tokens=1, ignore_eos=True)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.num_running == 1
    engine.abort(large)
    for _ in range(4):
        engine.step()
    assert engine.outputs[small].finish is not None
    assert engine.outputs[running].finish is None
    engine.run()
