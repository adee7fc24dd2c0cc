"""Single rules of the scheduler; the property tests see to the rest."""

import dataclasses

import numpy as np
import pytest

from dovetail.errors import InvariantError
from dovetail.exec.fake import FakeExecutor
from dovetail.sched.plan import FROM_DEVICE, NO_PAGES, PageWrites, RowStatus, SlotWrites, StepResult
from dovetail.sched.queues import RankedQueue
from dovetail.sched.sequence import Sequence
from dovetail.sched.slots import SlotTable
from dovetail.wire.request import Request, SamplingParams
from tests.support.scripted import EOS_ID, PagedFake, plain_config
from tests.support.stepper import Output, Stepper

LETTERS = [bytes([97 + token_id % 26]) for token_id in range(32)]


def stepper(script=lambda ids: 9, status=lambda ids: RowStatus.OK, **options) -> Stepper:
    config = plain_config(**options)
    device = PagedFake(
        num_slots=config.max_running, page_size=config.page_size, script=script, status=status
    )
    return Stepper(config, device, token_bytes=LETTERS.__getitem__, special_ids=frozenset({30}))


def run_one(made: Stepper, prompt=(5, 6, 7), **sampling) -> Output:
    request_id = made.add(prompt, **sampling)
    return made.run()[request_id]


def a_request(request_id: int = 1) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_new_tokens=4),
        seed=0,
    )


def a_sequence(arrival: int = 0) -> Sequence:
    return Sequence(
        a_request(arrival),
        sample_index=0,
        rank=(0, arrival),
        eos_token_ids=frozenset(),
        stop_matcher=None,
        columns={},
    )


# -- how a generation ends ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "script", "ids", "finish"),
    [
        ({"max_new_tokens": 3}, [9, 9, 9, 9], [9, 9, 9], ("length", None)),
        ({"max_new_tokens": 0}, [9], [], ("length", None)),
        ({"max_new_tokens": 1}, [9], [9], ("length", None)),
        ({"max_new_tokens": 9}, [9, EOS_ID], [9, EOS_ID], ("stop", EOS_ID)),
        # On the very last allowed token a stop is a stop.
        ({"max_new_tokens": 2}, [9, EOS_ID], [9, EOS_ID], ("stop", EOS_ID)),
        (
            {"max_new_tokens": 3, "ignore_eos": True},
            [9, EOS_ID, 9],
            [9, EOS_ID, 9],
            ("length", None),
        ),
        ({"max_new_tokens": 9, "stop_token_ids": (4, 8)}, [4], [4], ("stop", 4)),
        # ignore_eos is about the model's ids, not about the client's.
        (
            {"max_new_tokens": 9, "ignore_eos": True, "stop_token_ids": (EOS_ID,)},
            [EOS_ID],
            [EOS_ID],
            ("stop", EOS_ID),
        ),
        ({"max_new_tokens": 9, "stop": "df"}, [1, 3, 3, 5, 9], [1, 3, 3, 5], ("stop", "df")),
        ({"max_new_tokens": 9, "stop": ("bd", "abd")}, [0, 1, 3], [0, 1, 3], ("stop", "abd")),
        # An id comes before a stop string.
        ({"max_new_tokens": 9, "stop": "e", "stop_token_ids": (4,)}, [4], [4], ("stop", 4)),
        # Special tokens are no text, unless they are shown.
        ({"max_new_tokens": 3, "stop": "bd"}, [1, 30, 3], [1, 30, 3], ("stop", "bd")),
        (
            {"max_new_tokens": 3, "stop": "bd", "skip_special_tokens": False},
            [1, 30, 3],
            [1, 30, 3],
            ("length", None),
        ),
    ],
)
@pytest.mark.parametrize("depth", [0, 2])
def test_finish(sampling, script, ids, finish, depth):
    made = stepper(lambda known: script[min(len(known) - 3, len(script) - 1)], depth=depth)
    output = run_one(made, **sampling)
    assert output.finish is not None
    assert (output.token_ids, (output.finish.type, output.finish.matched)) == (ids, finish)


def test_each_token_is_streamed_as_it_is_committed():
    output = run_one(stepper(), max_new_tokens=5)
    assert output.num_events == 5


def test_a_step_of_length_zero_is_still_forwarded_and_captured():
    made = stepper()
    request_id = made.add([5, 6, 7], max_new_tokens=0, capture=("tokens",))
    assert made.run()[request_id].captured["tokens"].tolist() == [5, 6, 7]


# -- containment ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [RowStatus.NON_FINITE, RowStatus.EMPTY_SUPPORT])
def test_a_failed_draw_ends_its_own_request_alone(status):
    made = stepper(status=lambda ids: status if ids[0] == 1 and len(ids) > 5 else RowStatus.OK)
    bad = made.add([1, 2, 3, 4], max_new_tokens=8)
    good = made.add([2, 2, 3, 4], max_new_tokens=8)
    outputs = made.run()
    assert outputs[bad].finish.type == "error" and outputs[bad].finish.message
    assert outputs[bad].token_ids == [9, 9]
    assert (outputs[good].finish.type, outputs[good].token_ids) == ("length", [9] * 8)


def test_the_page_of_a_failed_draw_is_not_shared():
    """Its KV may hold NaN, and whoever hit it would fail as well."""
    failing = True
    made = stepper(
        status=lambda ids: RowStatus.NON_FINITE if failing else RowStatus.OK, page_size=4
    )
    prompt = [5] * 8
    assert run_one(made, prompt, max_new_tokens=2).finish.type == "error"
    assert made.ledger.match_len(b"", prompt, max_cached=8) == 0
    failing = False
    again = run_one(made, prompt, max_new_tokens=2)
    assert (again.finish.type, again.usage.cached_tokens) == ("length", 0)
    assert run_one(made, prompt, max_new_tokens=2).usage.cached_tokens == 4, "the good one is"


# -- aborts ---------------------------------------------------------------------------------


def test_abort_of_what_waits_runs_or_is_retracted():
    made = stepper(max_running=1, depth=1)
    running = made.add([5, 6], max_new_tokens=20)
    waiting = made.add([6, 7], max_new_tokens=20)
    for _ in range(6):
        made.step()
    made.abort(waiting)
    made.step()
    assert (made.outputs[waiting].finish.type, made.outputs[waiting].token_ids) == ("abort", [])
    assert made.outputs[waiting].finish.message.startswith("Abort before prefill")
    made.scheduler.retract_last()
    made.step()
    made.abort(running)
    made.abort(running)
    made.abort(99)
    outputs = made.run()
    assert outputs[running].finish.type == "abort"
    assert outputs[running].finish.message == "Aborted while it was generated"
    assert 4 <= len(outputs[running].token_ids) < 20, "what it had got is kept"
    assert outputs[running].usage.num_retractions == 1


def test_abort_in_a_prompt_says_so():
    """It had started, and yet nothing was generated."""
    made = stepper(chunk_size=4)
    long = made.add([5] * 24, max_new_tokens=4)
    made.step()
    made.step()
    made.abort(long)
    output = made.run()[long]
    assert (output.finish.message, output.token_ids) == ("Aborted in its prompt", [])


# -- plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_new_prompts_fill_a_chunk_whatever_the_size_of_pages(page_size):
    """The last one gets a page table of nearly a whole context for its one token in the chunk."""
    made = stepper(
        page_size=page_size, num_pages=64 + 1600 // page_size, context_len=130, chunk_size=241,
        max_running=8,
    )  # fmt: skip
    for first in (3, 4, 5):
        made.add([first], max_new_tokens=9)
    made.step()
    plans, submit = [], made.executor.submit
    made.executor.submit = lambda plan: (plans.append(plan), submit(plan))[1]
    for first, prompt_len in ((6, 60), (7, 60), (8, 60), (9, 60), (10, 128)):
        made.add([first] * prompt_len, max_new_tokens=2)
    made.run()
    assert plans[0].rows.width.tolist() == [1, 1, 1, 60, 60, 60, 60, 1]
    assert all(len(plan.page_writes) <= made.config.max_page_writes for plan in plans)


def test_decode_rows_that_all_get_a_page_have_room_beside_a_chunk():
    """They are not asked whether there is any: more would end the engine."""
    made = stepper(page_size=1, num_pages=500, context_len=24, chunk_size=24, max_running=16)
    plans, submit = [], made.executor.submit
    made.executor.submit = lambda plan: (plans.append(plan), submit(plan))[1]
    for i in range(14):
        made.add([3 + i], max_new_tokens=20)
    made.step()
    for i in range(3):
        made.add([20 + i, *[9] * 20], max_new_tokens=2)
    made.run()
    most = max(len(plan.page_writes) for plan in plans)
    assert made.config.max_pages_per_sequence + made.config.chunk_size < most
    assert most <= made.config.max_page_writes


def test_decode_goes_on_beside_chunks_of_a_long_prompt():
    """A prompt that takes many chunks does not stop who is decoding already."""
    made = stepper(context_len=64, num_pages=32, chunk_size=4, depth=0)
    decoding = made.add([5], max_new_tokens=12)
    made.step()
    made.add([6] * 40, max_new_tokens=2)
    for num_tokens in range(2, 12):
        made.step()
        assert len(made.outputs[decoding].token_ids) == num_tokens


def test_an_empty_scheduler_plans_nothing():
    assert stepper().scheduler.plan() is None


def test_a_request_id_cannot_be_used_twice():
    made = stepper()
    made.scheduler.add(a_request())
    with pytest.raises(InvariantError, match="request id 1 is used twice"):
        made.scheduler.add(a_request())


# -- slots and queues -----------------------------------------------------------------------


def test_a_stale_handle_is_an_error():
    table, first, second = SlotTable(1), a_sequence(), a_sequence()
    table.take(first)
    handle = (first.slot, first.generation)
    assert table.tenant(*handle) is first and table.num_free == 0
    table.release(first)
    with pytest.raises(InvariantError, match="stale"):
        table.tenant(*handle)
    table.take(second)
    assert second.slot == handle[0] and second.generation != handle[1]
    with pytest.raises(InvariantError, match="stale"):
        table.tenant(*handle)


def test_a_retracted_sequence_gets_its_old_place_in_the_queue():
    queue, sequences = RankedQueue(), [a_sequence(arrival) for arrival in range(4)]
    for arrival in (0, 2, 3, 1):
        queue.add(sequences[arrival])
    assert list(queue) == sequences
    assert (queue.first(1), queue.last) == ([sequences[0]], sequences[3])
    queue.remove(sequences[2])
    queue.remove(sequences[0])
    assert list(queue) == [sequences[1], sequences[3]]
    queue.add(sequences[0])
    assert queue.first(1) == [sequences[0]]


# -- the fake executor keeps the real one's contract ------------------------------------------


def first_plan():
    made = stepper(depth=0)
    made.add([5, 6], max_new_tokens=3)
    for message in made.inbox.take(wait=False):
        made.loop.apply(message)
    return made.scheduler, made.scheduler.plan()


def test_the_fake_executor_refuses_what_a_device_cannot_do():
    scheduler, plan = first_plan()
    fake = FakeExecutor(lambda ids: 9, num_slots=4, page_size=4)
    no_slots = SlotWrites(
        **{
            name: np.zeros(0, dtype=getattr(plan.slot_writes, name).dtype)
            for name in SlotWrites.__dataclass_fields__
        }
    )
    with pytest.raises(InvariantError, match="stale"):
        fake.submit(dataclasses.replace(plan, slot_writes=no_slots))
    with pytest.raises(InvariantError, match="past its pages"):
        fake.submit(dataclasses.replace(plan, page_writes=NO_PAGES))
    decode = dataclasses.replace(
        plan.rows,
        start=np.array([FROM_DEVICE], dtype=np.int32),
        width=np.array([1], dtype=np.int32),
    )
    with pytest.raises(InvariantError, match="without a sampled token"):
        fake.submit(dataclasses.replace(plan, rows=decode))
    pending = fake.submit(plan)
    scheduler.commit(plan, pending.result())
    with pytest.raises(InvariantError, match="taken twice"):
        pending.result()


def test_a_result_of_another_step_is_an_error():
    scheduler, plan = first_plan()
    result = FakeExecutor(lambda ids: 9, num_slots=4, page_size=4).submit(plan).result()
    fields = {name: getattr(result, name) for name in StepResult.__dataclass_fields__}
    with pytest.raises(InvariantError, match=r"step 0 is to be committed, not .* of step 5"):
        scheduler.commit(plan, StepResult(**fields | {"step_id": 5}))


def test_pages_are_told_once():
    """A plan holds the changes of page tables only."""
    made = stepper(page_size=4, depth=0)
    made.add([5] * 6, max_new_tokens=8)
    writes: list[PageWrites] = []
    submit = made.executor.submit
    made.executor.submit = lambda plan: (writes.append(plan.page_writes), submit(plan))[1]
    made.run()
    told = [index for write in writes for index in write.column("index").tolist()]
    assert told == [0, 1, 2, 3]
