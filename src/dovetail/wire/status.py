"""How an engine is: what it says of itself while it runs."""

from typing import Literal

import msgspec


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one moment.

    Attributes:
        num_running, num_waiting: sequences.
        num_pages, num_free_pages, num_cached_pages: of the KV pool; cached ones can be
            evicted at once.
        num_cached_tokens: prompt tokens served from the prefix cache since the start.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_cached_tokens: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine can answer.

    Attributes:
        state: ``alive`` (the loop turns), ``stalled`` (it has not turned for too long; it may
            go on) or ``dead`` (it never will).
        reason: why it is not alive; empty if it is.
    """

    state: Literal["alive", "stalled", "dead"]
    reason: str = ""
