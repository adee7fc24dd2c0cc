"""Which rows are read when: behind a prompt, before a known end, behind the last forward."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from dovetail.errors import InvariantError
from dovetail.exec.fake import FakeExecutor
from dovetail.exec.pending import PendingStep
from dovetail.sched.plan import StepPlan
from dovetail.sched.sequence import EARLY_ROWS, LATE_ROWS
from dovetail.wire.request import CaptureParams
from tests.support.scripted import EOS_ID, plain_config
from tests.support.stepper import Output, Stepper

PROMPT_LEN, CHUNK = 100, 64
PROMPT = [3 + i % 20 for i in range(PROMPT_LEN)]
NUM_CHUNKS = 2


class Watched(FakeExecutor):
    """Keeps the plans, and how many results were known when each was submitted."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.plans: list[StepPlan] = []
        self.num_known: list[int] = []
        self.num_results = 0
        self.on_result: Callable[[int], None] = lambda step: None

    def submit(self, plan):
        self.plans.append(plan)
        self.num_known.append(self.num_results)
        pending = super().submit(plan)

        def collect():
            self.on_result(plan.step_id)
            self.num_results += 1
            return pending.result()

        return PendingStep(plan, collect, pending.readouts)


def run(
    num_tokens: int,
    *,
    depth: int = 1,
    script=lambda ids: 9,
    capture: CaptureParams | None = None,
    **options,
) -> tuple[Output, Watched]:
    """Run one request that returns its tokens."""
    config = plain_config(context_len=512, num_pages=200, chunk_size=CHUNK, depth=depth, **options)
    executor = Watched(script, num_slots=config.max_running, page_size=config.page_size)
    stepper = Stepper(config, executor, token_bytes=lambda _: b"")
    capture = capture or CaptureParams(columns=("tokens",))
    request_id = stepper.add(PROMPT, capture=capture, max_new_tokens=num_tokens)
    output = stepper.run()[request_id]
    assert output.captured["tokens"].tolist() == (PROMPT + output.token_ids)[capture.start_len : -1]
    return output, executor


def read_by(executor: Watched) -> list[tuple[int, int, int]]:
    """Return (step, first row, end) of each read-out."""
    return [
        (step, r.start, r.end) for step, plan in enumerate(executor.plans) for r in plan.readouts
    ]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_prompt_is_read_behind_it_and_the_rest_at_a_known_end(depth):
    num_tokens = 90
    _, executor = run(num_tokens, depth=depth)
    num_forwards = NUM_CHUNKS + num_tokens - 1
    assert [len(plan.rows) for plan in executor.plans] == [1] * num_forwards + [0]
    prompt, late, last = read_by(executor)
    committed = NUM_CHUNKS + depth  # the step that is planned when the prompt is committed
    assert prompt == (committed, 0, PROMPT_LEN)
    until = PROMPT_LEN + num_tokens - LATE_ROWS
    assert late == (committed + until - PROMPT_LEN, PROMPT_LEN, until)
    # Behind the last forward, whose result nobody has seen yet.
    assert last == (num_forwards, until, PROMPT_LEN + num_tokens - 1)
    assert executor.num_known[num_forwards] == num_forwards - depth


def test_steady_decode_reads_nothing():
    _, executor = run(300)
    steady = range(NUM_CHUNKS + 2, NUM_CHUNKS + 300 - LATE_ROWS)
    assert not [step for step in steady if executor.plans[step].readouts]


def test_few_rows_are_not_worth_a_read_out_of_their_own():
    _, executor = run(EARLY_ROWS + LATE_ROWS - 1)
    assert [(start, end) for _, start, end in read_by(executor)] == [
        (0, PROMPT_LEN),
        (PROMPT_LEN, PROMPT_LEN + EARLY_ROWS + LATE_ROWS - 2),
    ]
    capture = CaptureParams(columns=("tokens",), start_len=PROMPT_LEN - EARLY_ROWS + 1)
    _, executor = run(5, capture=capture)
    assert [(start, end) for _, start, end in read_by(executor)] == [
        (capture.start_len, PROMPT_LEN + 4)
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_left", [0, 1, 2, 3])
def test_rows_behind_an_end_that_came_earlier_are_dropped(depth, num_left):
    """The last token is planned, its rows are read, and one of those before is a stop."""
    num_tokens = 40
    stop_at = PROMPT_LEN + num_tokens - num_left
    output, executor = run(
        num_tokens, depth=depth, script=lambda ids: EOS_ID if len(ids) + 1 == stop_at else 9
    )
    assert output.finish.type == "stop" and len(output.token_ids) == num_tokens - num_left
    read_too_far = max(end for _, _, end in read_by(executor)) > stop_at - 1
    assert read_too_far == (0 < num_left < depth)


def test_a_stream_is_read_at_its_interval_alone():
    capture = CaptureParams(columns=("tokens",), interval=50)
    output, executor = run(120, capture=capture)
    assert all(end - start >= 50 for _, start, end in read_by(executor)[:-1])
    assert output.num_events > 120  # rows come by themselves, too


def test_rows_that_are_read_ahead_are_no_news():
    output, _ = run(90)
    assert output.num_events == 90 + 1  # tokens one by one, and the end with all rows


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_answer_does_not_wait_for_the_forward_beside_which_its_rows_were_read(depth):
    """Of two requests the shorter one is answered before that forward's result is taken."""
    config = plain_config(context_len=512, num_pages=200, depth=depth)
    executor = Watched(lambda ids: 9, num_slots=config.max_running, page_size=config.page_size)
    stepper = Stepper(config, executor, token_bytes=lambda _: b"")
    capture = CaptureParams(columns=("tokens",))
    short = stepper.add([5, 6, 7], capture=capture, max_new_tokens=4, is_streamed=False)
    stepper.add([8, 9, 10], capture=capture, max_new_tokens=12, is_streamed=False)
    answered_at = []

    def look(step: int) -> None:
        if stepper.outputs[short].finish is not None and not answered_at:
            answered_at.append(executor.num_results)

    executor.on_result = look
    stepper.run()
    read_in = next(step for step, _, end in read_by(executor) if end == 6)
    assert len(executor.plans[read_in].rows) == 1, "the other one is forwarded beside it"
    assert answered_at == [read_in]


def test_rows_are_committed_once_and_before_their_step():
    config = plain_config(context_len=512, num_pages=200, depth=0)
    executor = Watched(lambda ids: 9, num_slots=config.max_running, page_size=config.page_size)
    stepper = Stepper(config, executor, token_bytes=lambda _: b"")
    stepper.add([5, 6, 7], capture=CaptureParams(columns=("tokens",)), max_new_tokens=2)
    stepper.step()
    stepper.step()
    scheduler, plan = stepper.scheduler, stepper.scheduler.plan()
    assert plan is not None and plan.readouts
    pending = executor.submit(plan)
    with pytest.raises(InvariantError, match="are taken first"):
        pending.result()
    rows = pending.readouts()
    with pytest.raises(InvariantError, match="has no rows that were not taken"):
        pending.readouts()
    result = pending.result()
    with pytest.raises(InvariantError, match="committed first"):
        scheduler.commit(plan, result)
    with pytest.raises(InvariantError, match=r"with the result of step 7"):
        scheduler.commit_readouts(plan, replace(rows, step_id=7))
    [event] = scheduler.commit_readouts(plan, rows)
    assert event.finish is not None
    with pytest.raises(InvariantError, match="come a second time"):
        scheduler.commit_readouts(plan, rows)
    assert scheduler.commit(plan, result) == []
