"""Which waiting sequence is next.

Owns the three policies and their bound: however long the queue, only its first
``WINDOW`` sequences are looked at, so planning costs the same with ten waiting and
with ten thousand.

* ``fcfs``: first come, first served.
* ``priority``: higher priority first, then first come.
* ``longest-prefix``: of the window, whoever finds most of its prompt in the prefix
  cache; who has been passed over ``MAX_PASSES`` times goes first, so nobody starves.
"""

from collections.abc import Callable
from typing import Literal

from dovetail.sched.sequence import Sequence

Policy = Literal["fcfs", "priority", "longest-prefix"]

WINDOW = 64
MAX_PASSES = 64


def rank(policy: Policy, *, priority: int, arrival: int) -> tuple[int, int]:
    """Return a sequence's place in line; lower is served first and retracted last."""
    return (-priority if policy == "priority" else 0, arrival)


def ordered(
    policy: Policy, window: list[Sequence], match_len: Callable[[Sequence], int]
) -> list[Sequence]:
    """Return the window in the order in which its sequences should be tried.

    Args:
        policy: see the module.
        window: the first sequences in line, by rank.
        match_len: prompt tokens that the prefix cache would serve.
    """
    if policy != "longest-prefix" or len(window) < 2:
        return window
    return sorted(window, key=lambda s: (s.num_passes < MAX_PASSES, -match_len(s), s.rank))
