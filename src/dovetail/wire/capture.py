"""Captured per-token columns as they leave the engine.

Owns what is told beside their rows, also where a file takes them to a client, and the type of
expert ids. What a row holds, and where it lives until then, must not be known here.
"""

from typing import Any, Literal

import msgspec
import numpy as np

from dovetail.wire.tensor import TensorEnvelope

COLUMNS = ("tokens", "experts", "expert_weights")
"""Every column there is; an engine always has the first."""

MAX_BYTE_EXPERTS = 255
"""Up to so many experts an id is a byte: one value must be left that is no id."""


def expert_dtype(num_experts: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the dtype of expert ids."""
    return np.dtype(np.uint8 if num_experts <= MAX_BYTE_EXPERTS else np.uint16)


class CaptureSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring rows with one history.

    Attributes:
        start, end: absolute positions, ``end`` excluded.
        epoch: weights epoch of the forward that the rows come from.
        num_recomputed: how often these positions were forwarded again after their rows had been
            recorded, because their sequence had lost its memory.
        num_differing: rows of the span that a later forward, or cache, did not reproduce. Tokens
            sampled since then saw those; the rows here are the recorded ones.
    """

    start: int
    end: int
    epoch: int
    num_recomputed: int = 0
    num_differing: int = 0


class CapturedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one column.

    Attributes:
        start: absolute position of the first row.
        rows: first axis is the position. A row says what was so when the token of its position
            was the *input*; the last sampled token was none, so it has no row.
        spans: of all rows of the generation; in its last event only.
    """

    start: int
    rows: TensorEnvelope
    spans: tuple[CaptureSpan, ...] = ()


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A memory file that a server has made for one client on its machine.

    Attributes:
        capture_file: its name, which requests and acknowledgements give.
        path: where it is; only the server's own user may open it.
        num_slots: parts of it; each takes the rows of one generation, whatever its length.
        slot_bytes: of each part; slot ``i`` begins at ``i * slot_bytes``.
    """

    capture_file: str
    path: str
    num_slots: int
    slot_bytes: int


class FileSlot(msgspec.Struct, frozen=True, kw_only=True):
    """One use of a slot: the slot, and how often it has been taken."""

    slot: int
    generation: int


class RowTransport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the rows of a reply come to a client that has a file.

    Attributes:
        type: ``file``, or ``inline``, as to any other client.
        capture_file, slot, generation: where, and what to acknowledge; for ``file``.
        reason: why the rows are not in the file; for ``inline``.
    """

    type: Literal["file", "inline"]
    capture_file: str | None = None
    slot: int | None = None
    generation: int | None = None
    reason: str | None = None
