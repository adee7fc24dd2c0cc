"""What a front end may ask of a running engine, wherever that runs.

Owns the border between those who make requests and the loop that serves them: in this process
(``core.local``) or in one of its own (``core.process``). Must not know text or torch.
"""

import os
from collections.abc import Callable
from typing import Protocol

from dovetail.config.schema import EngineConfig
from dovetail.core.mailbox import Deliver
from dovetail.errors import EngineClosed, EngineError
from dovetail.wire.control import Abort, AbortGroup
from dovetail.wire.request import Request
from dovetail.wire.status import EngineStats, Health

HEALTH_TIMEOUT_SECONDS = 5.0

Progress = Callable[[str, int, int], None]
"""Told (what is done, how much of it is done, how much there is) while an engine starts: weights
load, and on a GPU graphs are recorded."""


class Home:
    """The process that made an engine. Its forks have neither the threads that serve it nor anybody
    to free a lock that one of those held, so nothing of the engine may be waited for there."""

    def __init__(self) -> None:
        self._process_id = os.getpid()

    @property
    def failure(self) -> EngineClosed | None:
        """Why the engine is none here; None at home."""
        if os.getpid() == self._process_id:
            return None
        return EngineClosed(
            f"the engine is process {self._process_id}'s, and this is a fork of it; make an engine "
            "here, or start this process by multiprocessing's 'spawn'"
        )

    def check(self) -> None:
        """Raise EngineClosed in a fork. Come here before each wait, and before each lock."""
        failure = self.failure
        if failure is not None:
            raise failure


class EnginePort(Protocol):
    """A running engine. Thread-safe; nothing but ``close`` waits."""

    @property
    def home(self) -> Home:
        """Where it can be used; who waits for news asks that first."""
        ...

    @property
    def config(self) -> EngineConfig:
        """What was decided at start."""
        ...

    def start(self, request: Request, deliver: Deliver) -> None:
        """Begin a request, whose id is new to this engine.

        ``deliver`` gets its events, on a thread of the engine's, and must not block; who gives the
        same ``deliver`` for several requests gets the news of a step in one call, and answers that
        waited for captured rows in one before. Each generation gets exactly one last event, or all
        that are open an error.

        Raises:
            EngineClosed: the engine has been closed or has failed.
            CapacityError: as many generations run or wait as the engine takes on.
        """
        ...

    def send(self, message: Abort | AbortGroup) -> None:
        """Pass a message to the loop. To an engine that has ended it is no news."""
        ...

    def stats(self) -> EngineStats:
        """Return counts of this moment, or of one shortly before; see the implementation."""
        ...

    def health(self) -> Health:
        """Say whether the loop turns."""
        ...

    def close(self) -> None:
        """Abort what is open and end the engine. May be called twice."""
        ...


def health_of(failure: EngineError | None, *, turn_age_s: float, timeout_s: float) -> Health:
    """Return the health of a loop that ended with ``failure``, or turned ``turn_age_s`` ago."""
    if failure is not None:
        return Health(state="dead", reason=str(failure))
    if turn_age_s > timeout_s:
        return Health(state="stalled", reason=f"no turn of the loop for {turn_age_s:.1f} s")
    return Health(state="alive")
