"""What a front end and an engine in a process of its own say to each other.

Owns the messages that are of the process; those to its loop are ``wire.control``. Options and
configuration pass through as bytes: their types are of a later layer.
"""

import msgspec

from dovetail.wire.control import Abort, AbortGroup, Admit, Close
from dovetail.wire.result import TokenEvent
from dovetail.wire.status import EngineStats


class Start(msgspec.Struct, frozen=True, tag=True):
    """Load a model and serve. The first message; ``options`` is an encoded ``EngineOptions``."""

    options: bytes


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The start has done so much of something, of so much."""

    what: str
    num_done: int
    num_total: int


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The loop began its last turn ``turn_age_s`` seconds ago, and these were its counts."""

    turn_age_s: float
    stats: EngineStats


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves. ``config`` is an encoded ``EngineConfig``."""

    config: bytes
    heartbeat: Heartbeat


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start. ``field`` is that of a ``ConfigError``; None is any other error."""

    field: str | None
    message: str


class Events(msgspec.Struct, frozen=True, tag=True):
    """All news of one commit."""

    events: tuple[TokenEvent, ...]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The loop has ended and says why. The last message."""

    reason: str


ToEngine = Start | Admit | Abort | AbortGroup | Close
FromEngine = Loading | Ready | Refused | Events | Heartbeat | Ended
