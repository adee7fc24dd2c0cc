"""Messages to the engine loop. They are applied in arrival order, between steps."""

import msgspec

from dovetail.wire.request import Request


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Queue a validated request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request early. Unknown and already finished ids are ignored."""

    request_id: int


class AbortGroup(msgspec.Struct, frozen=True, tag=True):
    """End all open requests that carry this group label."""

    group: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Abort everything that is open and end the loop."""


Message = Admit | Abort | AbortGroup | Close
