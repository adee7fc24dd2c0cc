"""The loop answers everybody, whatever ends it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dovetail.core.mailbox import Inbox, News, Outbox
from dovetail.errors import CapacityError, DeviceError, EngineClosed, RequestError
from dovetail.exec.pending import PendingStep
from dovetail.sched.plan import StepPlan
from dovetail.wire.control import Abort, Close
from dovetail.wire.result import FinishReason, TokenEvent, Usage
from tests.support.scripted import PagedFake, plain_config
from tests.support.stepper import Stepper

CONFIG = plain_config(depth=1)
LETTERS = [bytes([97 + token_id % 26]) for token_id in range(32)]


class Faulty:
    """A device that fails where it is told to."""

    def __init__(self, *, at_submit: int = -1, at_result: int = -1, at_close: bool = False) -> None:
        self._device = PagedFake(num_slots=CONFIG.max_running, page_size=CONFIG.page_size)
        self._at_submit, self._at_result, self._at_close = at_submit, at_result, at_close
        self.num_closed = 0

    def submit(self, plan: StepPlan) -> PendingStep:
        if plan.step_id == self._at_submit:
            raise DeviceError("lost the device")
        pending = self._device.submit(plan)
        return PendingStep(plan, lambda: self._collect(pending), pending.readouts)

    def _collect(self, pending: PendingStep):
        if pending.plan.step_id == self._at_result:
            raise ZeroDivisionError("a bug of ours")
        return pending.result()

    def close(self) -> None:
        self.num_closed += 1
        if self._at_close:
            raise RuntimeError("the device does not even close")


@contextmanager
def no_thread() -> Iterator[None]:
    raise DeviceError("no context")
    yield


def told(request_id: int, news: list) -> Callable[[News], None]:
    """A client that notes each piece of news with the request that it opened."""

    def deliver(what: News) -> None:
        news.extend((request_id, one) for one in ([what] if isinstance(what, Exception) else what))

    return deliver


def running(device: Faulty) -> tuple[Stepper, list]:
    """A loop with two requests, whose news go to the list."""
    made, news = Stepper(CONFIG, device, token_bytes=LETTERS.__getitem__), []
    for prompt in ([5, 6], [7, 8]):
        request_id = made.add(prompt, max_new_tokens=5, ignore_eos=True)
        made.outbox.open(request_id, told(request_id, news))
    return made, news


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (Faulty(at_submit=2), "lost the device"),
        (Faulty(at_result=2), "a bug of ours"),
        (Faulty(at_submit=0), "lost the device"),
    ],
)
def test_a_failure_reaches_every_client(device, words):
    made, news = running(device)
    made.loop.run()
    last = dict(news)
    assert set(last) == {0, 1}
    for event in last.values():
        assert isinstance(event, EngineClosed) and words in str(event)
        assert event.__cause__ is not None
    assert device.num_closed == 1
    with pytest.raises(EngineClosed, match=words):
        made.outbox.open(2, news.append)


def test_clients_are_answered_though_the_device_fails_to_close():
    made, news = running(Faulty(at_submit=2, at_close=True))
    with pytest.raises(RuntimeError, match="does not even close"):
        made.loop.run()
    assert all(isinstance(event, EngineClosed) for event in dict(news).values())


def test_clients_are_answered_though_the_thread_cannot_be_prepared():
    made, news = running(Faulty())
    made.loop.run(no_thread())
    assert all("no context" in str(event) for event in dict(news).values()) and len(news) == 2


def test_close_aborts_what_is_open_and_ends():
    made, news = running(Faulty())
    made.inbox.put(Close())
    made.loop.run()
    assert [event.finish.type for event in dict(news).values()] == ["abort", "abort"]
    assert made.ledger.stats().held == 0


def test_who_comes_after_close_is_sent_away_at_once():
    """Else clients that keep coming would keep a closing loop alive."""
    made, news = running(Faulty())
    for _ in range(3):
        made.loop.step()
    made.inbox.put(Close())
    request_id = made.add([9], max_new_tokens=20, ignore_eos=True)
    made.outbox.open(request_id, told(request_id, news))
    made.loop.run()
    last = dict(news)[request_id]
    assert isinstance(last, TokenEvent)
    assert (last.finish.type, last.usage.completion_tokens) == ("abort", 0)


def test_a_closed_loop_ends_again_at_once():
    made, _ = running(Faulty())
    made.inbox.put(Close())
    made.inbox.put(Close())
    made.inbox.put(Abort(0))
    made.loop.run()
    assert made.loop.is_closing


def test_messages_keep_their_order():
    inbox = Inbox()
    messages = [Abort(i) for i in range(5)]
    for message in messages:
        inbox.put(message)
    assert inbox.take(wait=True) == messages
    assert inbox.take(wait=False) == []


def test_an_event_for_nobody_is_our_own_fault():
    with pytest.raises(KeyError):
        Outbox().put([TokenEvent(request_id=1, token_ids=(), logprobs=(), epochs=())])


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_depth_is_the_number_of_steps_in_flight(depth):
    made = Stepper(
        plain_config(depth=depth),
        PagedFake(num_slots=4, page_size=4),
        token_bytes=LETTERS.__getitem__,
    )
    made.add([5, 6], max_new_tokens=12, ignore_eos=True)
    most = []
    made.on_step = lambda _: most.append(len(made.loop.inflight))
    made.run()
    assert max(most) == depth


# -- how many may be open -------------------------------------------------------------------


def ended(request_id: int, sample_index: int = 0) -> TokenEvent:
    """The last event of a generation."""
    return TokenEvent(
        request_id=request_id,
        sample_index=sample_index,
        token_ids=(),
        logprobs=(),
        epochs=(),
        finish=FinishReason(type="length"),
        usage=Usage(prompt_tokens=1, completion_tokens=0),
    )


def nobody(news: News) -> None:
    """A client that does not listen."""


def test_there_is_room_for_so_many_generations_and_again_when_one_has_ended():
    outbox = Outbox(max_open=4)
    outbox.open(1, nobody, num_samples=3)
    outbox.open(2, nobody)
    for num_samples in (1, 2):
        with pytest.raises(CapacityError, match="4 generations run or wait") as caught:
            outbox.open(3, nobody, num_samples=num_samples)
        assert caught.value.retry_after_s > 0
    outbox.put([ended(1, 2)])
    outbox.open(3, nobody)
    with pytest.raises(CapacityError):
        outbox.open(4, nobody)
    outbox.put([ended(1, 0), ended(1, 1), ended(2), ended(3)])
    outbox.open(5, nobody, num_samples=4)


def test_a_request_that_will_never_have_room_is_refused_for_good():
    with pytest.raises(RequestError, match=r"sampling_params.n: is 5; .* at most 4 generations"):
        Outbox(max_open=4).open(1, nobody, num_samples=5)


def test_without_a_limit_all_are_taken():
    outbox, news = Outbox(), []
    for request_id in range(10_000):
        outbox.open(request_id, news.extend)
    outbox.put([ended(request_id) for request_id in range(10_000)])
    assert [event.request_id for event in news] == list(range(10_000))
