"""Rings of transfer blocks: a step owns its block until it retires."""

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InvariantError
from dovetail.exec.device import Device, Event

BLOCK_ALIGN_BYTES = 16


class TransferBlock:
    """Host memory and device memory of the same size, moved together.

    Attributes:
        host: uint8, see ``Device.host_block``.
        device: uint8, on the device.
        words: int32 view of ``host`` for the present user of the block.
        num_bytes: size of either.
        in_use: between ``BlockRing.acquire`` and ``BlockRing.release``.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES
        self.num_bytes = num_bytes
        self.host = device.host_block(num_bytes)
        self.device = device.device_block(num_bytes)
        self._host_words = self.host.numpy().view(np.int32)  # once: ``numpy()`` is a torch op
        self.words = self.open()
        self.fence: Event | None = None
        self.in_use = False

    def open(self) -> NDArray[np.int32]:
        """Give the host side to a new user, writable."""
        self.words = self._host_words.view()
        return self.words

    def freeze(self) -> None:
        """Make ``words`` read-only: a write after sending raises ValueError."""
        self.words.setflags(write=False)


class BlockRing:
    """Hands out blocks in turn; one comes round again only after its last user.

    The wait for the fence is always executed. With enough blocks it is satisfied
    already; the ring does not rely on it.
    """

    def __init__(self, device: Device, *, num_blocks: int, num_bytes: int) -> None:
        self._device = device
        self._blocks = [TransferBlock(device, num_bytes) for _ in range(num_blocks)]
        self._next = 0

    def acquire(self) -> TransferBlock:
        """Return the next block, free of any reader or writer.

        Raises:
            InvariantError: its last user has not given it back.
        """
        block = self._blocks[self._next]
        self._next = (self._next + 1) % len(self._blocks)
        if block.in_use:
            raise InvariantError("a ring of transfer blocks came round to a block still in use")
        if block.fence is not None:
            block.fence.wait()
        self._device.recycle(block.device)
        self._device.recycle(block.host)
        block.open()
        block.in_use = True
        return block

    def release(self, block: TransferBlock, *, fence: Event | None = None) -> None:
        """Give a block back; it is handed out again after ``fence``."""
        block.fence = fence
        block.in_use = False
        if fence is None:
            self._device.recycle(block.host)
