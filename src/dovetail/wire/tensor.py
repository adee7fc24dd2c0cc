"""The one way an array crosses the engine's border."""

from collections.abc import Sequence
from functools import cache

import msgspec
import numpy as np
from numpy.typing import NDArray


@cache
def _name_of(dtype: np.dtype[np.generic]) -> str:
    """Return numpy's name, which takes numpy longer than all else that there is to pack."""
    return dtype.name


class TensorEnvelope(msgspec.Struct, frozen=True):
    """An array as plain bytes, in as many pieces as it came in: who reads it joins them.

    Attributes:
        dtype: numpy name, little-endian (``int32``).
        shape: of the whole array.
        pieces: its bytes in C order, one or more pieces, cut anywhere.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[memoryview, ...]

    @classmethod
    def pack(cls, *arrays: NDArray[np.generic]) -> "TensorEnvelope":
        """Return an envelope of the arrays one behind the other, along the first axis.

        Nothing is copied: nobody may write to the arrays from now on.

        Args:
            arrays: one or more, in C order, that differ in their first axis alone.
        """
        first = arrays[0]
        shape = (sum(len(array) for array in arrays), *first.shape[1:])
        pieces = tuple(array.reshape(-1).view(np.uint8).data for array in arrays)
        return cls(_name_of(first.dtype), shape, tuple(piece.toreadonly() for piece in pieces))

    @classmethod
    def join(cls, parts: Sequence["TensorEnvelope"]) -> "TensorEnvelope":
        """Return an envelope of the parts one behind the other, along the first axis."""
        rows = sum(part.shape[0] for part in parts)
        pieces = tuple(piece for part in parts for piece in part.pieces)
        return cls(parts[0].dtype, (rows, *parts[0].shape[1:]), pieces)

    def unpack(self) -> NDArray[np.generic]:
        """Return the array, read-only: a view of the only piece, or the pieces joined."""
        arrays = [np.frombuffer(piece, dtype=np.uint8) for piece in self.pieces]
        # By numpy, which lets other threads run while it copies.
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        whole.flags.writeable = False
        return whole.view(self.dtype).reshape(self.shape)
