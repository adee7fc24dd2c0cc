"""Whether a reply came to be read.

Owns the word about it: from the connection, which alone can know, to whoever sent something with
the reply that is the client's only if it was told of it.
"""

from collections.abc import Callable

from starlette.types import Scope

EXTENSION = "dovetail.delivery"
"""Of an ASGI scope: the request's ``Delivery``."""


class Delivery:
    """The fate of one reply. Used on the event loop alone.

    A reply that was read and one that is still on its way look the same; so nothing is said for
    sure but that a reply has failed.
    """

    def __init__(self) -> None:
        self._has_failed = False
        self._calls: list[Callable[[], None]] = []

    @property
    def has_failed(self) -> bool:
        """True once the connection has closed with the reply not sent, or not read to its end."""
        return self._has_failed

    def on_failure(self, call: Callable[[], None]) -> None:
        """Call this if the reply turns out not to be read; at once if that is known."""
        if self._has_failed:
            call()
        else:
            self._calls.append(call)

    def fail(self) -> None:
        """Say that the reply has failed."""
        self._has_failed = True
        calls, self._calls = self._calls, []
        for call in calls:
            call()


def delivery_of(scope: Scope) -> Delivery:
    """Return the request's delivery; under a server that tells nothing, one that never fails."""
    extensions = scope.get("extensions") or {}
    return extensions.get(EXTENSION) or Delivery()
