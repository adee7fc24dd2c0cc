"""How many run at once is decided by what outputs turn out to need, not by what is asked for."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.sched.admission import LengthEstimate
from tests.support.scripted import EOS_ID, Tokens
from tests.support.scripted_engine import no_end, scripted_engine
from tests.support.stepper import Stepper

NUM_REQUESTS, PROMPT_LEN = 60, 8


def ends_soon(token_ids: Tokens) -> int:
    """Ends after five tokens, however many were asked for."""
    return EOS_ID if len(token_ids) == PROMPT_LEN + 4 else no_end(token_ids)


def run(
    script, *, max_new_tokens: int, num_pages: int, num_requests: int = NUM_REQUESTS
) -> tuple[Stepper, int]:
    """Return the engine and the most sequences that ran at once."""
    engine = scripted_engine(
        script=script,
        context_len=160,
        page_size=4,
        num_pages=num_pages,
        chunk_size=64,
        max_running=32,
        depth=1,
    )
    for i in range(num_requests):
        engine.add([3 + i % 29, *[3 + i // 29] * (PROMPT_LEN - 1)], max_new_tokens=max_new_tokens)
    most = 0

    def note(_: int) -> None:
        nonlocal most
        most = max(most, engine.scheduler.num_running)

    engine.on_step = note
    engine.run()
    return engine, most


def num_retractions(engine: Stepper) -> int:
    return sum(output.usage.num_retractions for output in engine.all_outputs)


def fix_share(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    fixed = property(lambda self: share, lambda self, _: None)
    monkeypatch.setattr(LengthEstimate, "share", fixed, raising=False)


def test_many_run_although_each_asks_for_the_whole_pool(monkeypatch):
    """Four pages each are used; 38 could be, by what was asked for."""
    engine, most = run(ends_soon, max_new_tokens=150, num_pages=80)
    assert most >= 10
    assert num_retractions(engine) <= NUM_REQUESTS // 10
    fix_share(monkeypatch, 1.0)
    reserved, most_reserved = run(ends_soon, max_new_tokens=150, num_pages=80)
    assert most_reserved <= 2
    assert engine.num_steps < 0.5 * reserved.num_steps


@pytest.mark.parametrize("num_pages", [80, 130])
def test_full_lengths_in_a_small_pool_cost_few_retractions(monkeypatch, num_pages):
    engine, _ = run(no_end, max_new_tokens=100, num_pages=num_pages)
    learnt, learnt_steps = num_retractions(engine), engine.num_steps
    assert learnt <= NUM_REQUESTS // 4
    forwarded = engine.num_forwarded
    fix_share(monkeypatch, 0.0)
    greedy, _ = run(no_end, max_new_tokens=100, num_pages=num_pages)
    assert num_retractions(greedy) >= 4 * max(learnt, 1)
    assert forwarded < greedy.num_forwarded
    assert learnt_steps < 1.6 * greedy.num_steps  # the price: fewer run at once


def test_one_that_needs_the_whole_pool_starts_alone():
    engine, most = run(no_end, max_new_tokens=152, num_pages=40, num_requests=6)
    assert most >= 1
    assert all(output.finish.type == "length" for output in engine.all_outputs)


@dataclass
class Running:
    """What an estimate looks at of a sequence."""

    known_len: int
    num_generated: int
    max_new_tokens: int

    @property
    def request(self) -> "Running":
        return self


def peak_growth(sequences: list[Running], share: float, page_size: int) -> int:
    """Let all grow step by step until the last has ended; return the most memory that takes."""
    left = [max(page_size, int(share * s.max_new_tokens) - s.num_generated) for s in sequences]
    now = sum(s.known_len for s in sequences)
    needs = [
        sum(s.known_len + step for s, end in zip(sequences, left, strict=True) if step <= end)
        for step in range(max(left) + 1)
    ]
    return max(needs) - now


@settings(deadline=None)
@given(
    sequences=st.lists(
        st.builds(Running, st.integers(1, 90), st.integers(0, 60), st.integers(0, 120)),
        min_size=1,
        max_size=12,
    ),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    page_size=st.sampled_from([1, 16]),
)
def test_what_must_be_there_is_the_peak_over_time(sequences, share, page_size):
    estimate = LengthEstimate()
    estimate.share = share
    assert estimate.growth(sequences, page_size) == peak_growth(sequences, share, page_size)


def test_the_estimate_moves_to_what_is_used_and_up_at_a_retraction():
    class Ended:
        def __init__(self, used: int, asked: int) -> None:
            self.num_generated = used
            self.request = type("Request", (), {"max_new_tokens": asked})

    estimate = LengthEstimate()
    for _ in range(200):
        estimate.observe(Ended(10, 100))
    assert estimate.share == pytest.approx(0.1, abs=0.01)
    for _ in range(3):
        estimate.observe_retraction()
    assert estimate.share == pytest.approx(0.4, abs=0.01)
    for _ in range(100):
        estimate.observe_retraction()
    assert estimate.share == 1.0
    estimate.observe(Ended(0, 0))  # asked for nothing, used nothing
    assert 0 <= estimate.share <= 1
