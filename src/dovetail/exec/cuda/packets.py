"""From the host's memory to the GPU's: the packet of the step at hand.

Owns where it lies on the GPU, at a fixed address, and which block of the ring is read next: the one
behind that of the packet that lies there. A kernel of the step fetches it, so a recorded step holds
all of its way; whoever queued a copy for it would make one call of the driver more each step, with
cold caches (``docs/decisions/0030``).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dovetail.exec.device import TransferBlock
from dovetail.exec.packet import NUM_WORDS, NUMBER
from dovetail.kernels.triton.jit import jit

_BLOCK = 2048
"""Words that are fetched at a time; packets of steps without prompts are shorter."""


@jit
def _fetch_kernel(
    packet_ptr, addresses_ptr, NUM_BLOCKS: tl.constexpr, MAX_WORDS: tl.constexpr,
    NUMBER: tl.constexpr, NUM_WORDS: tl.constexpr, TAKES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the packet behind the last one taken; if it is not taken, that one's number stays."""
    last = tl.load(packet_ptr + NUMBER)
    source_ptr = tl.load(addresses_ptr + last % NUM_BLOCKS).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()  # all of the program has read the number that part of it overwrites
    # The host wrote it, and writes there again: what a cache holds of an earlier step is old.
    num_words = tl.minimum(tl.load(source_ptr + NUM_WORDS, volatile=True), MAX_WORDS)
    word = tl.arange(0, BLOCK)
    is_copied = word < MAX_WORDS
    if not TAKES:
        is_copied = is_copied & (word != NUMBER)
    value = tl.load(source_ptr + word, mask=word < MAX_WORDS, volatile=True)
    tl.store(packet_ptr + word, value, mask=is_copied)
    for begin in range(BLOCK, num_words, BLOCK):
        word = begin + tl.arange(0, BLOCK)
        value = tl.load(source_ptr + word, mask=word < num_words, volatile=True)
        tl.store(packet_ptr + word, value, mask=word < num_words)


class Packets:
    """Packets in turn. Launches alone, so as work of the compute lane.

    Args:
        blocks: the ring; see ``StepBlocks``.
        device: whose kernels read them.

    Attributes:
        words: int32, the packet that was fetched last; at first one without rows, number 0.
    """

    def __init__(self, blocks: Sequence[TransferBlock], device: torch.device) -> None:
        self.words = torch.zeros(blocks[0].num_bytes // 4, dtype=torch.int32, device=device)
        self._blocks = blocks  # whose memory the addresses lead to
        addresses = [block.device_address for block in blocks]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)

    def take(self) -> None:
        """Fetch the next packet, once a step; before the first there is one without rows."""
        self._fetch(takes=True)

    def peek(self) -> None:
        """Fetch the next packet for work that comes before its step, which takes it again."""
        self._fetch(takes=False)

    def _fetch(self, *, takes: bool) -> None:
        _fetch_kernel[(1,)](
            self.words, self._addresses, NUM_BLOCKS=len(self._addresses),
            MAX_WORDS=len(self.words), NUMBER=NUMBER, NUM_WORDS=NUM_WORDS, TAKES=takes,
            BLOCK=min(_BLOCK, triton.next_power_of_2(len(self.words))), num_warps=8,
        )  # fmt: skip
