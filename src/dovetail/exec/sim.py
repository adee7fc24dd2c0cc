"""A device whose lanes interleave in any legal order, chosen by a seed.

Owns the search for missing events: work waits in its lane until the simulation
picks it, so a copy reads its source when it is *executed*, not when it was
submitted. Whatever lane order and events do not forbid will happen for some seed.
For tests; it runs the same torch code as the CPU device.
"""

import random
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from dovetail.errors import DeviceError, InvariantError
from dovetail.exec.device import Event, Lane, TransferBlock, download
from dovetail.exec.memory import TaggedMemory, host_memory

POISON_BYTE = 0xA5


class SimEvent:
    """A point in a simulated lane."""

    def __init__(self, device: "SimDevice") -> None:
        self.happened = False
        self._device = device

    def wait(self) -> None:
        """Run work, in an order of the simulation's choice, until the point is reached."""
        while not self.happened:
            if not self._device.run_one():
                raise DeviceError("deadlock: every lane waits for an event that nobody records")


class SimLane:
    """A queue of work, events and waits."""

    def __init__(self, device: "SimDevice", name: str) -> None:
        self.name = name
        self._device = device
        self._items: deque[Callable[[], None] | SimEvent] = deque()

    def submit(
        self,
        fn: Callable[..., None],
        *args: object,
        reads: tuple[Tensor, ...] = (),
        writes: tuple[Tensor, ...] = (),
    ) -> None:
        """Queue ``fn(*args)`` and let the simulation run whatever it likes."""
        self._device.check_access(self, reads, writes)
        self._items.append(lambda: fn(*args))
        self._device.run_some()

    def download(self, block: TransferBlock, begin: int, end: int) -> None:
        """See ``Lane``."""
        self.submit(download, block, begin, end, reads=(block.device,), writes=(block.host,))

    def record(self) -> Event:
        """Return the present end of the queue."""
        event = SimEvent(self._device)

        def happen() -> None:
            event.happened = True

        self._items.append(happen)
        return event

    def wait(self, event: Event) -> None:
        """Hold the queue here until ``event``."""
        assert isinstance(event, SimEvent)
        self._items.append(event)

    @property
    def is_ready(self) -> bool:
        """True if the head of the queue may run now."""
        if not self._items:
            return False
        head = self._items[0]
        return head.happened if isinstance(head, SimEvent) else True

    def run_head(self) -> None:
        """Run the head of the queue."""
        head = self._items.popleft()
        if not isinstance(head, SimEvent):
            head()


class SimDevice:
    """Two simulated lanes.

    Invariants, checked at every submission: the copy lane never touches engine
    state; only the compute lane writes it. Blocks that a ring takes back are
    filled with junk, so that a late reader or writer shows.

    The seed also chooses a temper: how much work runs at a submission, from none until
    somebody waits to all of it, and which lane tends to get ahead of the other.
    """

    torch_device = torch.device("cpu")

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._eagerness = self._random.choice((0.0, 0.3, 0.6, 0.9))
        self._compute_first = self._random.choice((0.15, 0.5, 0.85))
        self._lanes = (SimLane(self, "compute"), SimLane(self, "copy"))
        self._state_addresses: set[int] = set()
        self.compute: Lane = self._lanes[0]
        self.copy: Lane = self._lanes[1]
        self.memory: TaggedMemory = host_memory()

    def host_block(self, num_bytes: int) -> Tensor:
        """Return plain memory."""
        return torch.full((num_bytes,), POISON_BYTE, dtype=torch.uint8)

    def address_of(self, host_block: Tensor) -> int | None:
        """Return where it lies: work of the compute lane reads it when it runs."""
        return host_block.data_ptr()

    def device_block(self, num_bytes: int) -> Tensor:
        """Return plain memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def recycle(self, block: Tensor) -> None:
        """Fill the block with junk."""
        block.numpy().fill(POISON_BYTE)

    def register_state(self, *tensors: Tensor) -> None:
        """Remember whose memory the tensors are views of."""
        self._state_addresses |= {_address(tensor) for tensor in tensors}

    def adopt_thread(self) -> AbstractContextManager[None]:
        """Nothing to prepare."""
        return nullcontext()

    def check_access(
        self, lane: SimLane, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]
    ) -> None:
        """Raise InvariantError if ``lane`` may not touch this memory."""
        if lane is self.compute:
            return
        for tensor in (*reads, *writes):
            if _address(tensor) in self._state_addresses:
                raise InvariantError(f"lane {lane.name} touches engine state")

    def run_some(self) -> None:
        """Run a random number of items."""
        while self._random.random() < self._eagerness and self.run_one():
            pass

    def run_one(self) -> bool:
        """Run the head of a random lane that is ready; False if none is."""
        ready = [lane for lane in self._lanes if lane.is_ready]
        if not ready:
            return False
        is_compute_first = self._random.random() < self._compute_first
        ready[0 if is_compute_first else -1].run_head()
        return True

    def close(self) -> None:
        """Run what is left."""
        while self.run_one():
            pass


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
