# pyright: strict
"""What goes wrong in a replay.

Owns one exception. A trace that does not hold together is a ``records.TraceError``.
"""


class ReplayError(RuntimeError):
    """A replay that would not have computed what the rollout did; the message says what to do."""
