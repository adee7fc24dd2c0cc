"""The device memory that lives as long as the engine, by tag: weights, and the KV with its columns.

Owns the protocol, and its plain form. Memory of a tag can be given back to the device and taken
again *at the same addresses*, so that whoever holds such a tensor, a recorded graph above all, need
not know of it. Must not know what the memory holds.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

Tag = Literal["weights", "kv"]


class TaggedMemory(Protocol):
    """Memory by tag. One thread at a time; nothing may run on the device meanwhile.

    Attributes:
        can_unmap: whether ``unmap`` gives memory back.
        reason: why it can, or cannot.
    """

    can_unmap: bool
    reason: str

    def zeros(self, tag: Tag, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor of zeros; its memory is the device's again when it is gone.

        Raises:
            DeviceError: the device has not so much memory.
            InvariantError: the tag is unmapped.
        """
        ...

    def num_bytes(self, tag: Tag) -> int:
        """Return the bytes that the tag's tensors take of the device; 0 while it is unmapped."""
        ...

    def unmap(self, tag: Tag) -> int:
        """Give the tag's memory back, contents lost, addresses kept; return how many bytes.

        Nothing may touch the tag's tensors, not even a graph, until ``map``. Where ``can_unmap`` is
        false nothing happens, and 0 is returned. To unmap what is unmapped does nothing.

        Raises:
            DeviceError: the device failed.
        """
        ...

    def map(self, tag: Tag) -> int:
        """Take memory for the tag's tensors again; what they hold is undefined.

        Returns:
            How many bytes; 0 where nothing was unmapped.

        Raises:
            DeviceError: the device has not so much memory left; the tag is still unmapped.
        """
        ...


class PlainMemory:
    """Memory of torch's own allocator, which keeps its place and cannot be unmapped."""

    can_unmap = False

    def __init__(self, device: torch.device, reason: str) -> None:
        self.reason = reason
        self._device = device
        self._num_bytes: dict[Tag, int] = {}

    def zeros(self, tag: Tag, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See ``TaggedMemory``."""
        tensor = torch.zeros(tuple(shape), dtype=dtype, device=self._device)
        self._num_bytes[tag] = self.num_bytes(tag) + tensor.nbytes
        return tensor

    def num_bytes(self, tag: Tag) -> int:
        """Return the bytes that were taken for the tag; those of tensors that are gone count."""
        return self._num_bytes.get(tag, 0)

    def unmap(self, tag: Tag) -> int:
        """Do nothing; see ``TaggedMemory``."""
        return 0

    def map(self, tag: Tag) -> int:
        """Do nothing; see ``TaggedMemory``."""
        return 0


def host_memory() -> PlainMemory:
    """Return the memory of a device that is the host."""
    return PlainMemory(torch.device("cpu"), "the device is the host")
