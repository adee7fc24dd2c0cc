"""From the host's memory to the GPU's: the packet of the step at hand.

Owns where it lies on the GPU, at a fixed address, and which block of the ring is read next: the one
behind that of the packet that was taken last. A kernel of the step fetches it, so a recorded step
holds all of its way; whoever queued a copy for it would make one call of the driver more each step,
with cold caches (``docs/decisions/0030``).
"""

from collections.abc import Sequence

import torch
import triton.language as tl

from dovetail.errors import InvariantError
from dovetail.exec.device import TransferBlock
from dovetail.exec.packet import NUM_WORDS, NUMBER
from dovetail.kernels.triton.jit import jit

_FIRST = 512
"""Words that are fetched first: mostly all of a packet whose rows are those of the step before."""

_MORE = 2048
"""Words that are fetched at a time after that."""


@jit
def _fetch_kernel(
    packet_ptr, last_ptr, addresses_ptr, NUM_BLOCKS: tl.constexpr, MAX_WORDS: tl.constexpr,
    NUMBER: tl.constexpr, NUM_WORDS: tl.constexpr, TAKES: tl.constexpr, FIRST: tl.constexpr,
    MORE: tl.constexpr,
):  # fmt: skip
    """Copy the packet behind the last one taken.

    Each trip over the bus counts, so the first brings the length, too. What lies behind the length
    is never read, so whole vectors are copied. Loads are volatile, for a cache may hold an older
    packet.
    """
    last = tl.load(last_ptr) & 0x7FFFFFFF  # junk, too, leads to a block of the ring
    source_ptr = tl.load(addresses_ptr + last % NUM_BLOCKS).to(tl.pointer_type(tl.int32))
    source_ptr = tl.multiple_of(source_ptr, 16)
    word = tl.arange(0, FIRST)
    value = tl.load(source_ptr + word, mask=word < MAX_WORDS, other=0, volatile=True)
    tl.store(packet_ptr + word, value, mask=word < MAX_WORDS)
    num_words = tl.minimum(tl.sum(tl.where(word == NUM_WORDS, value, 0)), MAX_WORDS)
    for begin in range(FIRST, num_words, MORE):
        behind = begin + tl.arange(0, MORE)
        value_behind = tl.load(source_ptr + behind, mask=behind < MAX_WORDS, volatile=True)
        tl.store(packet_ptr + behind, value_behind, mask=behind < MAX_WORDS)
    if TAKES:
        number = tl.sum(tl.where(word == NUMBER, value, 0))
        tl.debug_barrier()  # every thread has read the last number before one changes it
        tl.store(last_ptr, number)


class Packets:
    """Packets in turn. It only launches, so as work of the compute lane.

    Args:
        blocks: the ring; see ``StepBlocks``.
        device: whose kernels read them.

    Attributes:
        words: int32, the packet that was fetched last; at first one without rows, number 0.
    """

    def __init__(self, blocks: Sequence[TransferBlock], device: torch.device) -> None:
        self.words = torch.zeros(blocks[0].num_bytes // 4, dtype=torch.int32, device=device)
        self._last_number = torch.zeros(1, dtype=torch.int32, device=device)
        self._blocks = blocks  # whose memory the addresses lead to
        addresses = [block.device_address for block in blocks]
        if any(address % 16 for address in addresses):
            raise InvariantError("a block of packets does not begin at a multiple of 16 bytes")
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)

    def take(self) -> None:
        """Fetch the next packet, once a step; before the first there is one without rows."""
        self._fetch(takes=True)

    def peek(self) -> None:
        """Fetch the next packet for work that comes before its step, which takes it again."""
        self._fetch(takes=False)

    def _fetch(self, *, takes: bool) -> None:
        _fetch_kernel[(1,)](
            self.words, self._last_number, self._addresses, NUM_BLOCKS=len(self._addresses),
            MAX_WORDS=len(self.words), NUMBER=NUMBER, NUM_WORDS=NUM_WORDS, TAKES=takes,
            FIRST=_FIRST, MORE=_MORE, num_warps=4,
        )  # fmt: skip
