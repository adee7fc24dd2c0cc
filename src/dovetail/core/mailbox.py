"""The loop's two doors: one ordered inbox, and an outbox with a stream per request.

Owns the only places where client threads and the loop thread meet.
"""

import queue
import threading
from collections.abc import Callable, Sequence

from dovetail.core.control import Refit
from dovetail.errors import CapacityError, EngineClosed, EngineError, RequestError
from dovetail.wire.control import Message
from dovetail.wire.result import TokenEvent

IDLE_WAIT_SECONDS = 0.5
RETRY_AFTER_SECONDS = 1.0
"""A place is free as soon as any generation ends, so there is no point in a longer wait."""

News = Sequence[TokenEvent] | EngineError
"""Events of one commit, or the error that has ended every request a client has open."""

Deliver = Callable[[News], None]
"""Hands news to a client; called on the engine's thread, must not block."""


class Inbox:
    """Messages to the loop, in arrival order. Any thread may put."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message | Refit] = queue.SimpleQueue()

    def put(self, message: Message | Refit) -> None:
        """Queue a message."""
        self._messages.put(message)

    def take(self, *, wait: bool) -> list[Message | Refit]:
        """Return all messages that are there; with ``wait``, wait a bounded time for the first."""
        messages: list[Message | Refit] = []
        try:
            if wait:
                messages.append(self._messages.get(timeout=IDLE_WAIT_SECONDS))
            while True:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            return messages


class Outbox:
    """Routes events to the clients that opened a stream for them.

    Invariants: every opened stream gets a last event or an error, also if the loop
    has ended in between; no more than ``max_open`` generations are open at once (None is no limit).
    """

    def __init__(self, *, max_open: int | None = None) -> None:
        self._max_open = max_open
        self._total_open = 0
        self._lock = threading.Lock()
        self._streams: dict[int, Deliver] = {}
        self._num_open: dict[int, int] = {}
        self._failure: EngineError | None = None

    def open(self, request_id: int, deliver: Deliver, *, num_samples: int = 1) -> None:
        """Register the client of a request that makes ``num_samples`` generations.

        Raises:
            EngineClosed: the loop has ended.
            CapacityError: there is no room for so many generations now.
            RequestError: there will never be.
        """
        with self._lock:
            if self._failure is not None:
                raise EngineClosed(str(self._failure))
            self._check_room(num_samples)
            self._total_open += num_samples
            self._streams[request_id] = deliver
            self._num_open[request_id] = num_samples

    def _check_room(self, num_samples: int) -> None:
        if self._max_open is None:
            return
        if num_samples > self._max_open:
            raise RequestError(
                "sampling_params.n",
                f"is {num_samples}; this engine takes on at most {self._max_open} generations",
            )
        if self._total_open + num_samples > self._max_open:
            raise CapacityError(
                f"{self._total_open} generations run or wait, and the engine takes on "
                f"{self._max_open}; try again in {RETRY_AFTER_SECONDS:g} s",
                retry_after_s=RETRY_AFTER_SECONDS,
            )

    @property
    def failure(self) -> EngineError | None:
        """Why the loop has ended; None while it runs."""
        return self._failure

    def put(self, events: Sequence[TokenEvent]) -> None:
        """Deliver events, in one call a client; a stream ends with its request's last event."""
        batches: dict[Deliver, list[TokenEvent]] = {}
        with self._lock:
            for event in events:
                batches.setdefault(self._streams[event.request_id], []).append(event)
                if event.finish is not None:
                    self._end_one(event.request_id)
        for deliver, batch in batches.items():
            deliver(batch)

    def _end_one(self, request_id: int) -> None:
        self._total_open -= 1
        self._num_open[request_id] -= 1
        if self._num_open[request_id] == 0:
            del self._num_open[request_id]
            del self._streams[request_id]

    def close(self, failure: EngineError) -> None:
        """Tell every client with open streams, and every later one, that the loop has ended.

        The first failure counts; a second call changes nothing.
        """
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            clients = dict.fromkeys(self._streams.values())
            self._streams.clear()
            self._num_open.clear()
            self._total_open = 0
        for deliver in clients:
            deliver(failure)
