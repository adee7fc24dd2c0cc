"""Where the explorer plays: the simulation, real threads made less predictable, and inline."""

import random
import time
from collections.abc import Callable

from torch import Tensor

from dovetail.exec.device import CpuDevice, Device, Event, Lane, ThreadedCpuDevice, TransferBlock
from dovetail.exec.sim import POISON_BYTE, SimDevice


class SlowLane:
    """A lane whose work now and then takes a while."""

    def __init__(self, lane: Lane, seed: int, *, seconds: float = 0.002) -> None:
        self._lane = lane
        self._random = random.Random(seed)
        self._seconds = seconds

    def submit(
        self,
        fn: Callable[..., None],
        *args: object,
        reads: tuple[Tensor, ...] = (),
        writes: tuple[Tensor, ...] = (),
    ) -> None:
        """Queue ``fn(*args)``, sometimes behind a nap."""
        self._nap()
        self._lane.submit(fn, *args, reads=reads, writes=writes)

    def download(self, block: TransferBlock, begin: int, end: int) -> None:
        """Queue the copy, sometimes behind a nap."""
        self._nap()
        self._lane.download(block, begin, end)

    def _nap(self) -> None:
        if self._random.random() < 0.3:
            self._lane.submit(time.sleep, self._random.random() * self._seconds)

    def record(self) -> Event:
        """See ``Lane``."""
        return self._lane.record()

    def wait(self, event: Event) -> None:
        """See ``Lane``."""
        self._lane.wait(event)


class SlowThreads(ThreadedCpuDevice):
    """Threads with naps; blocks that a ring takes back are filled with junk."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.compute: Lane = SlowLane(self.compute, seed)
        self.copy: Lane = SlowLane(self.copy, seed + 1)

    def recycle(self, block: Tensor) -> None:
        """Fill the block with junk."""
        block.numpy().fill(POISON_BYTE)


DEVICES: dict[str, Callable[[int], Device]] = {
    "sim": SimDevice,
    "threads": SlowThreads,
    "cpu": lambda seed: CpuDevice(),
}
"""From a seed to a device, by name."""
