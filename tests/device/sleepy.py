"""A GPU whose lanes sleep before each piece of work, so that whoever does not wait loses for sure.

Blocks that a ring takes back are filled with junk, as ``exec.sim`` does.
"""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dovetail.exec.cuda.device import CudaDevice
from dovetail.exec.device import Event, Lane, TransferBlock
from dovetail.exec.sim import POISON_BYTE

CYCLES = (0, 1_000_000, 10_000_000)
"""Of the GPU's clock, about 2 GHz: nothing, half a millisecond, five; the host takes one or two."""


class SleepyLane:
    """A lane with a sleep kernel before each work."""

    def __init__(self, lane: Lane, rng: random.Random, *, cycles: Sequence[int]) -> None:
        self._lane = lane
        self._rng = rng
        self._cycles = cycles
        self.num_sleeps = 0
        self.before_last: Event = lane.record()

    def submit(
        self,
        fn: Callable[..., None],
        *args: object,
        reads: tuple[Tensor, ...] = (),
        writes: tuple[Tensor, ...] = (),
    ) -> None:
        """Queue a sleep and ``fn(*args)``."""
        self._sleep()
        self._lane.submit(fn, *args, reads=reads, writes=writes)

    def download(self, block: TransferBlock, begin: int, end: int) -> None:
        """Queue a sleep and the copy."""
        self._sleep()
        self._lane.download(block, begin, end)

    def _sleep(self) -> None:
        self.before_last = self._lane.record()
        cycles = self._rng.choice(self._cycles)
        if cycles:
            self.num_sleeps += 1
            self._lane.submit(torch.cuda._sleep, cycles)

    def record(self) -> Event:
        """See ``Lane``."""
        return self._lane.record()

    def wait(self, event: Event) -> None:
        """See ``Lane``."""
        self._lane.wait(event)


def sleepy_gpu(seed: int) -> CudaDevice:
    """Return a GPU that is slow now and then, on one lane or on both, or always, as seeds say."""
    gpu, rng = CudaDevice(), random.Random(seed)
    now_and_then, always, never = CYCLES, CYCLES[1:], CYCLES[:1]
    of_lanes = (
        (now_and_then, never),
        (never, now_and_then),
        (now_and_then, now_and_then),
        (always, always),
    )
    of_compute, of_copy = of_lanes[seed % len(of_lanes)]
    true_lane = gpu.compute
    gpu.compute = SleepyLane(true_lane, rng, cycles=of_compute)
    gpu.copy = SleepyLane(gpu.copy, rng, cycles=of_copy)

    def recycle(block: Tensor) -> None:
        """Fill the block with junk: on the host at once, on the GPU before the lane's next work."""
        if block.device.type == "cpu":
            block.numpy().fill(POISON_BYTE)
        else:
            true_lane.submit(block.fill_, POISON_BYTE)

    gpu.recycle = recycle
    return gpu
