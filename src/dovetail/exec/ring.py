"""Rings of transfer blocks: a step owns its block until it retires."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from dovetail.errors import InvariantError
from dovetail.exec.device import Device, Event, TransferBlock


def paired_blocks(device: Device, memories: Iterable[Tensor]) -> list[TransferBlock]:
    """Return a block for each of these pieces of device memory."""
    return [
        TransferBlock(i, device.host_block(len(memory)), memory)
        for i, memory in enumerate(memories)
    ]


def readable_blocks(device: Device, num_bytes: int, *, num_blocks: int) -> list[TransferBlock]:
    """Return blocks that the device reads in the host's memory, or in its own where it cannot."""
    blocks = []
    for i in range(num_blocks):
        host = device.host_block(num_bytes)
        address = device.address_of(host)
        if address is None:
            blocks.append(TransferBlock(i, host, device.device_block(num_bytes)))
        else:
            blocks.append(TransferBlock(i, host, host, address))
    return blocks


class BlockRing:
    """Hands out blocks in turn; one comes round again only after its last user.

    A fence is waited for unless it is known to have been passed. With enough blocks it has
    been; the ring does not rely on it.
    """

    def __init__(self, device: Device, blocks: Sequence[TransferBlock]) -> None:
        self._device = device
        self._blocks = blocks
        self._next = 0

    @property
    def num_blocks(self) -> int:
        """How many take turns."""
        return len(self._blocks)

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
        for memory in block.memories:
            self._device.recycle(memory)
        block.open()
        block.in_use = True
        return block

    def release(self, block: TransferBlock, *, fence: Event | None = None) -> None:
        """Give a block back; it is handed out again after ``fence``."""
        block.fence = fence
        block.in_use = False
        if fence is None:
            self._device.recycle(block.host)

    def note_passed(self, block: TransferBlock, fence: Event) -> None:
        """Take note that a fence has been passed: to ask for it is a call to the driver."""
        if block.fence is fence:
            block.fence = None
