"""What a front end may ask of a running engine, wherever that runs.

Owns the border between those who make requests and the loop that serves them: in this process
(``core.local``) or in one of its own (``core.process``). Must not know text or torch.
"""

from collections.abc import Callable
from typing import Protocol

from dovetail.config.schema import EngineConfig
from dovetail.core.mailbox import Deliver
from dovetail.errors import EngineError
from dovetail.wire.control import Abort, AbortGroup
from dovetail.wire.request import Request
from dovetail.wire.status import EngineStats, Health

HEALTH_TIMEOUT_SECONDS = 5.0

Progress = Callable[[str, int, int], None]
"""Told (what is done, how much of it is done, how much there is) while an engine starts: weights
load, and on a GPU graphs are recorded."""


class EnginePort(Protocol):
    """A running engine. Thread-safe; nothing but ``close`` waits."""

    @property
    def config(self) -> EngineConfig:
        """What was decided at start."""
        ...

    def start(self, request: Request, deliver: Deliver) -> None:
        """Begin a request, whose id is new to this engine.

        ``deliver`` gets its events, on a thread of the engine's, and must not block; who gives the
        same ``deliver`` for several requests gets the news of a step in one call. Each generation
        gets exactly one last event, or all that are open an error.

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
