"""How large a step's optional results can be: what scheduler and executor both count by."""

from dovetail.wire.validate import MAX_TOP_LOGPROBS

PAYLOAD_ALIGN = 16
"""Arrays in the payload block begin at multiples of this many bytes."""

SIDECAR_BYTES = 4
"""Bytes a token takes in a read-out of the token sidecar."""


def score_bytes(count: int, *, num_top: int, num_ids: int) -> int:
    """Return an upper bound of the payload bytes of a ``Score``."""
    return 4 * PAYLOAD_ALIGN + 4 * count * (1 + 2 * num_top + num_ids)


def sample_score_bytes(num_rows: int) -> int:
    """Return the payload bytes that are kept free for sampled tokens: one score a row at most.

    Read-outs and prompt scores, which can wait for another step, must not use them.
    """
    return num_rows * score_bytes(1, num_top=MAX_TOP_LOGPROBS, num_ids=MAX_TOP_LOGPROBS)


def readout_bytes(num_tokens: int) -> int:
    """Return an upper bound of the payload bytes of a ``Readout``."""
    return PAYLOAD_ALIGN + SIDECAR_BYTES * num_tokens
