# pyright: strict
"""What goes wrong in a replay.

Owns one exception, and how a value of the wrong kind is called. A trace that does not hold
together is a ``records.TraceError``.
"""


class ReplayError(RuntimeError):
    """A replay that would not have computed what the rollout did; the message says what to do."""


def kind_of(value: object) -> str:
    """Return what a value is, for messages: "None", "a list", "an int"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
