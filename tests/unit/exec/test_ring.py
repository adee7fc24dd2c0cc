"""A step owns its transfer block until it retires; nobody can touch it in between."""

import numpy as np
import pytest

from dovetail.errors import InvariantError
from dovetail.exec.device import CpuDevice, Device
from dovetail.exec.ring import BlockRing, paired_blocks, readable_blocks
from dovetail.exec.sim import POISON_BYTE, SimDevice


class Fence:
    """An event that counts the waits."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def ring_of(num_blocks: int, device: Device | None = None) -> BlockRing:
    device = device or CpuDevice()
    memories = [device.device_block(16) for _ in range(num_blocks)]
    return BlockRing(device, paired_blocks(device, memories))


def test_blocks_come_round_in_turn():
    ring = ring_of(3)
    seen = []
    for _ in range(6):
        block = ring.acquire()
        seen.append(block)
        ring.release(block)
    assert seen[:3] == seen[3:] and len(set(map(id, seen))) == 3
    assert [block.index for block in seen[:3]] == [0, 1, 2]
    assert len(seen[0].host) == len(seen[0].device) == seen[0].num_bytes == 16
    assert len(seen[0].words) == 4


def test_a_block_still_in_use_is_never_handed_out():
    ring = ring_of(2)
    first, _second = ring.acquire(), ring.acquire()
    with pytest.raises(InvariantError, match="still in use"):
        ring.acquire()
    assert first.in_use


def test_the_fence_of_the_last_user_is_waited_for_each_time():
    ring, fence = ring_of(1), Fence()
    ring.release(ring.acquire(), fence=fence)
    assert fence.num_waits == 0
    block = ring.acquire()
    assert fence.num_waits == 1
    ring.release(block)
    ring.acquire()
    assert fence.num_waits == 1, "a block given back without a fence has none"


def test_a_fence_that_was_passed_is_not_waited_for_and_another_one_is():
    ring, passed, other = ring_of(1), Fence(), Fence()
    block = ring.acquire()
    ring.release(block, fence=passed)
    ring.note_passed(block, passed)
    ring.release(ring.acquire(), fence=other)
    ring.note_passed(block, passed)  # news of a user before
    ring.acquire()
    assert (passed.num_waits, other.num_waits) == (0, 1)


def test_a_frozen_block_cannot_be_written_and_the_next_user_can():
    ring = ring_of(1)
    block = ring.acquire()
    words = block.words
    words[0] = 7
    block.freeze()
    with pytest.raises(ValueError, match="read-only"):
        words[0] = 8
    ring.release(block)
    assert ring.acquire().words.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        words[0] = 9  # the last user's view stays frozen


def test_a_simulated_device_fills_returned_blocks_with_junk():
    ring = ring_of(1, SimDevice(seed=0))
    block = ring.acquire()
    block.host.zero_()
    block.device.zero_()
    ring.release(block)
    assert (block.host.numpy() == POISON_BYTE).all(), "nobody reads it any more"
    block = ring.acquire()
    assert (block.device.numpy() == POISON_BYTE).all()
    assert block.words.dtype == np.int32


@pytest.mark.parametrize("can_read", [True, False])
def test_a_device_reads_blocks_in_the_hosts_memory_where_it_can(can_read, monkeypatch):
    device = SimDevice(seed=0)
    if not can_read:
        monkeypatch.setattr(device, "address_of", lambda host: None)
    blocks = readable_blocks(device, 16, num_blocks=2)
    ring = BlockRing(device, blocks)
    for block in blocks:
        assert block.is_shared == can_read
        assert (block.device_address == block.host_address) == can_read
        assert block.device_address == block.device.data_ptr()
        for memory in (block.host, block.device):
            memory.zero_()
        assert ring.acquire() is block
        assert (block.host.numpy() == POISON_BYTE).all()
        assert (block.device.numpy() == POISON_BYTE).all()
