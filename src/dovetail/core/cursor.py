"""Where an asyncio reader stands in the news of its requests.

Owns what has been delivered and not yet read, and the one place where the engine's thread wakes an
event loop. News of one generation that nobody has taken is one event, however long it waits: a
reader that stalls costs its tokens once. Must not know text.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable

from dovetail.core.mailbox import News
from dovetail.errors import EngineError
from dovetail.wire.capture import CapturedRows
from dovetail.wire.result import Scores, TokenEvent
from dovetail.wire.tensor import TensorEnvelope


class Backlog:
    """The unread events of one generation, as columns; ``join`` makes one event of them."""

    def __init__(self, first: TokenEvent) -> None:
        self._first = self._last = first
        self._columns: tuple[list[int], list[float], list[int]] | None = None
        self._scores: list[Scores] = [] if first.scores is None else [first.scores]
        self._captured = [] if first.captured is None else [first.captured]
        self._prompt_scores = first.prompt_scores

    def add(self, event: TokenEvent) -> None:
        """Append the generation's next event."""
        if self._columns is None:  # most events are taken before there is a second
            first = self._first
            self._columns = list(first.token_ids), list(first.logprobs), list(first.epochs)
        token_ids, logprobs, epochs = self._columns
        token_ids += event.token_ids
        logprobs += event.logprobs
        epochs += event.epochs
        if event.scores is not None:
            self._scores.append(event.scores)
        if event.captured is not None:
            self._captured.append(event.captured)
        if event.prompt_scores is not None:  # with the first token, before which rows may come
            self._prompt_scores = event.prompt_scores
        self._last = event

    def join(self) -> TokenEvent:
        """Return the events as one."""
        if self._columns is None:
            return self._first
        token_ids, logprobs, epochs = self._columns
        return TokenEvent(
            request_id=self._first.request_id,
            sample_index=self._first.sample_index,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            epochs=tuple(epochs),
            scores=_joined(self._scores),
            prompt_scores=self._prompt_scores,
            finish=self._last.finish,
            usage=self._last.usage,
            captured=_joined_rows(self._captured),
        )


def joined(events: Iterable[TokenEvent]) -> list[TokenEvent]:
    """Return one event a generation, in the order of their first ones.

    What a token costs to pass on is mostly the event around it.
    """
    backlogs: dict[tuple[int, int], Backlog] = {}
    for event in events:
        key = event.request_id, event.sample_index
        backlog = backlogs.get(key)
        if backlog is None:
            backlogs[key] = Backlog(event)
        else:
            backlog.add(event)
    return [backlog.join() for backlog in backlogs.values()]


def _joined(parts: list[Scores]) -> Scores | None:
    if not parts:
        return None
    return Scores(
        logprobs=tuple(x for part in parts for x in part.logprobs),
        top_ids=tuple(row for part in parts for row in part.top_ids),
        top_logprobs=tuple(row for part in parts for row in part.top_logprobs),
        id_logprobs=tuple(row for part in parts for row in part.id_logprobs),
        masks=tuple(row for part in parts for row in part.masks),
        mask_logprobs=tuple(x for part in parts for x in part.mask_logprobs),
    )


def _joined_rows(parts: list[dict[str, CapturedRows]]) -> dict[str, CapturedRows] | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return {
        name: CapturedRows(
            start=parts[0][name].start,
            rows=TensorEnvelope.join([part[name].rows for part in parts]),
            spans=parts[-1][name].spans,
        )
        for name in parts[0]
    }


class Cursor:
    """One request's unread news.

    Invariant: at most one ``Backlog`` a generation. ``add`` and ``fail`` are called under the
    lock of the owning ``Newsstand``, on the engine's thread; the rest on the event loop's.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._backlogs: dict[int, Backlog] = {}
        self._failure: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def add(self, event: TokenEvent) -> None:
        """Append an event; lock held."""
        backlog = self._backlogs.get(event.sample_index)
        if backlog is None:
            self._backlogs[event.sample_index] = Backlog(event)
        else:
            backlog.add(event)

    def fail(self, failure: EngineError) -> None:
        """Raise ``failure`` to the reader after the news that it has not read; lock held."""
        self._failure = failure

    def wake(self) -> None:
        """Let the reader look; event loop only."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[TokenEvent]:
        """Wait for news and take it: at most one event a generation.

        Raises:
            EngineClosed: the engine has ended.
        """
        while True:
            with self._lock:
                backlogs, self._backlogs = self._backlogs, {}
                failure = self._failure
            if backlogs:
                return [backlog.join() for backlog in backlogs.values()]
            if failure is not None:
                raise failure
            # Nothing can come between the look and the wait: ``wake`` runs on this very loop.
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


class Newsstand:
    """All cursors whose readers run on one event loop.

    ``deliver`` is called on the engine's thread and wakes the event loop once, however many
    requests the news is of. ``on_deserted`` is called with the ids that were still open when the
    event loop turned out to be closed.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_deserted: Callable[[Iterable[int]], None]
    ) -> None:
        self._loop = loop
        self._on_deserted = on_deserted
        self._lock = threading.Lock()
        self._cursors: dict[int, Cursor] = {}
        self._ready: set[Cursor] = set()
        self._is_woken = False

    @property
    def is_empty(self) -> bool:
        """True if nobody reads here."""
        return not self._cursors

    def open(self, request_id: int) -> Cursor:
        """Return the cursor of a request that is about to start."""
        cursor = Cursor(self._lock)
        with self._lock:
            self._cursors[request_id] = cursor
        return cursor

    def drop(self, request_id: int) -> None:
        """Forget a request; later news of it is nobody's."""
        with self._lock:
            cursor = self._cursors.pop(request_id, None)
            if cursor is not None:
                self._ready.discard(cursor)

    def deliver(self, news: News) -> None:
        """Put news on the cursors and wake their readers."""
        with self._lock:
            if isinstance(news, EngineError):
                for cursor in self._cursors.values():
                    cursor.fail(news)
                self._ready.update(self._cursors.values())
            else:
                for event in news:
                    cursor = self._cursors.get(event.request_id)
                    if cursor is not None:
                        cursor.add(event)
                        self._ready.add(cursor)
            if not self._ready:
                return
            if self._is_woken and not self._loop.is_closed():  # else it may never have woken
                return
            self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the event loop is closed: nobody listens any more
            with self._lock:
                deserted, self._cursors = self._cursors, {}
                self._ready.clear()
            self._on_deserted(deserted)

    def _wake(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, set()
            self._is_woken = False
        for cursor in ready:
            cursor.wake()
