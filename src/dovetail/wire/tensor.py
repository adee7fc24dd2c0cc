"""The one way an array crosses the engine's border."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray


class TensorEnvelope(msgspec.Struct, frozen=True):
    """An array as plain bytes.

    Attributes:
        dtype: numpy name, little-endian (``int32``).
        shape: of the array.
        data: its bytes in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def pack(cls, array: NDArray[np.generic]) -> "TensorEnvelope":
        """Return an envelope with a copy of ``array``."""
        return cls(array.dtype.name, array.shape, array.tobytes())

    @classmethod
    def join(cls, parts: Sequence["TensorEnvelope"]) -> "TensorEnvelope":
        """Return an envelope of the parts one behind the other, along the first axis."""
        rows = sum(part.shape[0] for part in parts)
        shape = (rows, *parts[0].shape[1:])
        return cls(parts[0].dtype, shape, b"".join(part.data for part in parts))

    def unpack(self) -> NDArray[np.generic]:
        """Return the array as a read-only view of the envelope's bytes."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)
