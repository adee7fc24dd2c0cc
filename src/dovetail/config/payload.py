"""How large a step's optional results can be: what scheduler and executor both count by."""

from collections.abc import Iterable

from dovetail.config.capture import ColumnSpec
from dovetail.wire.validate import MAX_MASK_IDS, MAX_TOP_LOGPROBS

PAYLOAD_ALIGN = 16
"""Arrays in the payload block begin at multiples of this many bytes."""


MASK_HEAD_WORDS = 2
"""Words of a sampling mask before its ids: their number, and the drawn token's logprob."""


def score_bytes(count: int, *, num_top: int, num_ids: int, max_mask: int = 0) -> int:
    """Return an upper bound of the payload bytes of a ``Score``."""
    mask_words = MASK_HEAD_WORDS + max_mask if max_mask else 0
    return 5 * PAYLOAD_ALIGN + 4 * (count * (1 + 2 * num_top + num_ids) + mask_words)


def sample_score_bytes(num_rows: int) -> int:
    """Return the payload bytes that are kept free for sampled tokens: one score a row at most.

    Read-outs and prompt scores, which can wait for another step, must not use them.
    """
    return num_rows * score_bytes(
        1, num_top=MAX_TOP_LOGPROBS, num_ids=MAX_TOP_LOGPROBS, max_mask=MAX_MASK_IDS
    )


def readout_bytes(num_tokens: int, columns: Iterable[ColumnSpec]) -> int:
    """Return an upper bound of the payload bytes of a ``Readout`` of these columns."""
    return sum(PAYLOAD_ALIGN + spec.row_bytes * num_tokens for spec in columns)


def readout_rows(num_bytes: int, columns: Iterable[ColumnSpec]) -> int:
    """Return how many rows of these columns fit into so many payload bytes."""
    specs = tuple(columns)
    room = num_bytes - PAYLOAD_ALIGN * len(specs)
    return max(0, room // sum(spec.row_bytes for spec in specs))
