"""Packets are fetched in turn from where the host wrote them, whole, and looked at before."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dovetail.exec.cuda import packets as packets_module
from dovetail.exec.cuda.device import CudaDevice
from dovetail.exec.cuda.packets import Packets
from dovetail.exec.device import CpuDevice, TransferBlock
from dovetail.exec.packet import NUM_WORDS, NUMBER
from dovetail.exec.ring import readable_blocks
from tests.support.gpu import DEVICE, ON_GPU_TOO

pytestmark = ON_GPU_TOO

MAX_WORDS = 3000


def write(block: TransferBlock, number: int, *, num_words: int = 40) -> np.ndarray:
    words = block.open()
    words[:] = np.arange(MAX_WORDS) + 1000 * number
    words[NUMBER], words[NUM_WORDS] = number, num_words
    return words


def words_of(packets: Packets) -> np.ndarray:
    return packets.words.cpu().numpy().copy()


@pytest.fixture
def ring() -> Iterator[list[TransferBlock]]:
    device = CpuDevice() if DEVICE.type == "cpu" else CudaDevice()
    blocks = readable_blocks(device, 4 * MAX_WORDS, num_blocks=3)
    assert all(block.is_shared for block in blocks)
    yield blocks
    device.close()


@pytest.mark.parametrize(("first", "more"), [(8, 16), (16, 32), (512, 2048)])
def test_packets_are_taken_in_turn_whole_and_no_further(first, more, ring, monkeypatch) -> None:
    monkeypatch.setattr(packets_module, "_FIRST", first)
    monkeypatch.setattr(packets_module, "_MORE", more)
    packets = Packets(ring, DEVICE)
    packets.take()
    assert not packets.words.any()  # nobody has written one
    for number in range(1, 9):
        before = words_of(packets)
        num_words = (5, 16, 17, 600, MAX_WORDS)[number % 5]
        words = write(ring[(number - 1) % 3], number, num_words=num_words)
        for fetch in (packets.peek, packets.peek, packets.take):
            packets.words[5:] = -1
            fetch()
            got = words_of(packets)
            np.testing.assert_array_equal(got[:num_words], words[:num_words])
            num_trips = max(0, -(-(num_words - first) // more))
            assert (got[first + num_trips * more :] == -1).all()
        assert before[NUMBER] == number - 1


def test_after_a_packet_of_junk_the_next_is_one_of_the_ring(ring) -> None:
    """Of a block that was filled again before it was read; the host finds the number wrong."""
    packets = Packets(ring, DEVICE)
    ring[0].host.fill_(0xA5)
    packets.take()
    words_of(packets)  # it is there, so the block can be written again
    written = [write(block, number) for number, block in enumerate(ring, start=1)]
    packets.take()
    assert any(np.array_equal(words_of(packets)[:40], words[:40]) for words in written)


def test_what_a_packet_says_of_its_length_leads_nobody_outside(ring) -> None:
    packets = Packets(ring, DEVICE)
    words = write(ring[0], 1, num_words=2**30)
    packets.take()
    np.testing.assert_array_equal(packets.words.cpu().numpy(), words)


def test_what_the_host_writes_later_is_seen_by_the_kernel_after(ring) -> None:
    """The same block, whose old words a cache might hold."""
    packets = Packets(ring[:1], DEVICE)
    for number in range(1, 200):
        words = write(ring[0], number)
        packets.take()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        assert packets.words[NUMBER] == number
        np.testing.assert_array_equal(packets.words[:40].cpu().numpy(), words[:40])
