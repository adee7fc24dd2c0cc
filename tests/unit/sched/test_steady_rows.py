"""Rows that are only counted: what a look at every row, at every step, would not have hidden.

Tokens of a steady sequence wait in arrays, dozens at a time. Here ends, aborts, retractions and
read-outs come before, at and after the moments at which records take them.
"""

from itertools import pairwise

import pytest

from dovetail.sched.plan import RowStatus
from dovetail.sched.progress import MOST_END_IDS, MOST_NEW
from dovetail.wire.request import CaptureParams
from tests.support.scripted import EOS_ID, PagedFake, plain_config
from tests.support.stepper import Output, Stepper

PROMPT = [5, 6, 7]
LENGTHS = (1, 2, MOST_NEW - 1, MOST_NEW, MOST_NEW + 1, MOST_NEW + 2, 2 * MOST_NEW + 1)
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def counting(ids: list[int]) -> int:
    """Tokens by their positions: 8 to 29, in turn."""
    return 8 + len(ids) % 22


def wanted(num_tokens: int, prompt_len: int = len(PROMPT)) -> list[int]:
    return [8 + (prompt_len + i) % 22 for i in range(num_tokens)]


def stepper(script=counting, status=lambda ids: RowStatus.OK, **options) -> Stepper:
    defaults = {"context_len": 200, "num_pages": 400, "page_size": 16, "chunk_size": 64}
    config = plain_config(**(defaults | options))
    device = PagedFake(
        num_slots=config.max_running, page_size=config.page_size, script=script, status=status
    )
    return Stepper(config, device, token_bytes=lambda token_id: bytes([token_id]))


def end_at(number: int, end_id: int):
    """Return the script that counts, and gives ``end_id`` as the token of this number."""
    return lambda ids: end_id if len(ids) - len(PROMPT) + 1 == number else counting(ids)


def others(engine: Stepper) -> list[int]:
    """Add two requests that go on beside, one of them with a look at each of its rows."""
    return [
        engine.add([1, 1, 1, 1], max_new_tokens=150, ignore_eos=True, is_streamed=False),
        engine.add([1, 1], max_new_tokens=150, ignore_eos=True, stop="never"),
    ]


def check_others(engine: Stepper, ids: list[int]) -> None:
    for request_id, prompt_len in zip(ids, (4, 2), strict=True):
        output = engine.outputs[request_id]
        assert output.finish.type == "length"
        assert output.token_ids == wanted(150, prompt_len)


def check_events(output: Output, *, is_streamed: bool) -> None:
    """A stream has each token as it comes; its last one may come with the end."""
    count = len(output.token_ids)
    assert output.num_events in ((count, count + 1) if is_streamed else (1,))


@DEPTHS
@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_a_length_is_kept_to_the_token(depth, is_streamed, page_size):
    engine = stepper(depth=depth, page_size=page_size, max_running=9)
    beside = others(engine)
    ids = [
        engine.add(PROMPT, max_new_tokens=n, ignore_eos=True, is_streamed=is_streamed)
        for n in LENGTHS
    ]
    engine.run()
    for request_id, num_tokens in zip(ids, LENGTHS, strict=True):
        output = engine.outputs[request_id]
        assert (output.finish.type, output.token_ids) == ("length", wanted(num_tokens))
        check_events(output, is_streamed=is_streamed)
    check_others(engine, beside)


@DEPTHS
@pytest.mark.parametrize("number", LENGTHS)
@pytest.mark.parametrize(
    ("end_id", "asked"),
    [
        (EOS_ID, {}),
        (31, {"stop_token_ids": (31,)}),
        (31, {"stop_token_ids": (31, *range(3, 2 + MOST_END_IDS)), "ignore_eos": True}),
        (7, {"stop_token_ids": tuple(range(8)), "ignore_eos": True}),
    ],
    ids=["eos", "stop id", "as many as are compared", "more"],
)
def test_an_end_id_ends_at_its_very_token(depth, number, end_id, asked):
    if "ignore_eos" in asked:
        assert (len(asked["stop_token_ids"]) > MOST_END_IDS) == (end_id == 7)
    engine = stepper(end_at(number, end_id), depth=depth)
    output = engine.ask(PROMPT, max_new_tokens=190, is_streamed=number % 2 == 0, **asked)
    assert (output.finish.type, output.finish.matched) == ("stop", end_id)
    assert output.token_ids == [*wanted(number - 1), end_id]


def test_the_end_ids_of_a_slots_last_tenant_end_nothing():
    engine = stepper(end_at(9, 31), max_running=1)
    assert len(engine.ask(PROMPT, max_new_tokens=40, stop_token_ids=(31,)).token_ids) == 9
    assert len(engine.ask(PROMPT, max_new_tokens=40, ignore_eos=True).token_ids) == 40
    assert len(engine.ask(PROMPT, max_new_tokens=40, stop_token_ids=(30,)).token_ids) == 40


@DEPTHS
@pytest.mark.parametrize("number", [2, MOST_NEW, MOST_NEW + 1])
def test_a_draw_that_fails_ends_with_what_was_drawn_before(depth, number):
    def status(ids: list[int]) -> RowStatus:
        is_it = ids[:3] == PROMPT and len(ids) - len(PROMPT) + 1 == number
        return RowStatus.NON_FINITE if is_it else RowStatus.OK

    engine = stepper(status=status, depth=depth)
    beside = others(engine)
    request_id = engine.add(PROMPT, max_new_tokens=190, ignore_eos=True, is_streamed=False)
    output = engine.run()[request_id]
    assert output.finish.type == "error" and output.token_ids == wanted(number - 1)
    check_others(engine, beside)


@DEPTHS
@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("after", [1, 2, 5, MOST_NEW, MOST_NEW + 3])
def test_an_abort_gives_every_token_that_was_committed_once(depth, is_streamed, after):
    engine = stepper(depth=depth)
    beside = others(engine)
    request_id = engine.add(PROMPT, max_new_tokens=190, ignore_eos=True, is_streamed=is_streamed)
    for _ in range(after + depth):
        engine.step()
    engine.abort(request_id)
    output = engine.run()[request_id]
    assert (output.finish.type, output.token_ids) == ("abort", wanted(after))
    check_events(output, is_streamed=is_streamed)
    check_others(engine, beside)


@DEPTHS
@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("every", [3, 17, MOST_NEW + 5])
def test_a_retraction_loses_no_token_and_tells_none_twice(depth, is_streamed, every):
    engine = stepper(depth=depth)
    beside = others(engine)
    request_id = engine.add(PROMPT, max_new_tokens=100, ignore_eos=True, is_streamed=is_streamed)

    def retract(step: int) -> None:
        if step % every == 0 and step < 140:
            engine.scheduler.retract_last()

    engine.on_step = retract
    output = engine.run()[request_id]
    assert output.usage.num_retractions >= 1 and output.token_ids == wanted(100)
    check_events(output, is_streamed=is_streamed)
    check_others(engine, beside)


@DEPTHS
@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("interval", [0, 7, MOST_NEW, MOST_NEW + 9])
def test_rows_leave_at_their_interval_and_are_those_of_the_tokens(depth, is_streamed, interval):
    engine = stepper(depth=depth)
    request_id = engine.add(
        PROMPT,
        max_new_tokens=150,
        ignore_eos=True,
        is_streamed=is_streamed,
        capture=CaptureParams(columns=("tokens",), interval=interval),
    )
    others(engine)
    longest = 0

    def look(_: int) -> None:
        nonlocal longest
        output = engine.outputs[request_id]
        known = len(PROMPT) + len(output.token_ids) - 1
        rows = len(output.captured.get("tokens", ()))
        if is_streamed and output.finish is None:
            longest = max(longest, known - rows)

    engine.on_step = look
    output = engine.run()[request_id]
    assert output.captured["tokens"].tolist() == [*PROMPT, *wanted(149)]
    assert [(span.start, span.end) for span in output.spans["tokens"]] == [(0, 152)]
    if is_streamed and interval:
        assert longest <= interval + 2 * (depth + 1)


@DEPTHS
def test_what_was_generated_is_shared_once_its_sequence_has_ended(depth):
    """Its last pages too, which nobody had shared by then."""
    engine = stepper(depth=depth, page_size=4)
    first = engine.ask(PROMPT, max_new_tokens=MOST_NEW + 10, ignore_eos=True)
    again = engine.ask([*PROMPT, *first.token_ids, 3], max_new_tokens=1)
    assert again.usage.cached_tokens == (len(PROMPT) + MOST_NEW + 9) // 4 * 4


def test_pages_of_a_failed_draw_are_not_shared():
    engine = stepper(page_size=4, status=lambda ids: RowStatus(len(ids) > 20))
    first = engine.ask(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert first.finish.type == "error" and len(first.token_ids) == 18
    assert engine.ledger.match_len(b"", [*PROMPT, *first.token_ids], max_cached=99) == 0


def test_the_plan_of_a_step_like_the_last_has_the_same_rows():
    """The very object, so that whoever sends it need not compare."""
    engine = stepper(depth=0, page_size=16)
    plans = []
    plan = engine.scheduler.plan
    engine.scheduler.plan = lambda: plans.append(plan()) or plans[-1]
    engine.ask(PROMPT, max_new_tokens=30, ignore_eos=True)
    decodes = [made.rows for made in plans if made is not None and len(made.token_ids) == 0]
    assert len(decodes) == 29 and all(new is old for old, new in pairwise(decodes))
    assert sum(len(made.page_writes) for made in plans if made is not None) == 2
