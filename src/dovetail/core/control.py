"""Messages to the loop that exist within its process only: they carry live objects.

Owns their shape. Those that cross a border between processes are ``wire.control``.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

MAX_VERSION = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Refit:
    """Serve under new weights, which are whole and checked already.

    Attributes:
        install: writes them over the old ones; called with nothing in flight, as device work.
        version: of the new weights; None is one more than the old ones'.
        done: gets the version, or the ``RequestError`` for which nothing has changed.
    """

    install: Callable[[], None]
    version: int | None
    done: "Future[int]" = field(default_factory=lambda: Future[int]())
