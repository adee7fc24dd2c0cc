"""Lanes, events and blocks that both sides reach: all that the executor may assume of a device.

Owns the rule that *all* device work is submitted to a lane, as a function or as a copy: a
lane is an ordered queue of work, lanes are ordered among each other only by events. Must
not know what the work does.

Four devices exist: ``CpuDevice`` runs work at once, ``ThreadedCpuDevice`` on a thread
a lane, ``exec.sim.SimDevice`` in any order that lanes and events allow, and
``exec.cuda.device.CudaDevice`` on two streams of a GPU.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.errors import DeviceError
from dovetail.exec.memory import TaggedMemory, host_memory

WAIT_SECONDS = 300.0


class Event(Protocol):
    """A point in a lane."""

    def wait(self) -> None:
        """Block the calling thread until all work before the point is done.

        Raises:
            DeviceError: work before the point failed.
        """
        ...


class TransferBlock:
    """Host memory and device memory of the same size, of one user at a time.

    Attributes:
        index: of the block in its ring.
        host: uint8, see ``Device.host_block``.
        device: uint8, on the device; ``host`` itself if the device reads that where it lies.
        is_shared: whether both are the same memory, so that nothing needs to be copied.
        memories: the pieces of memory that belong to the block's user.
        words: int32 view of ``host`` for the present user of the block.
        host_address, device_address: where they lie, for whoever reaches them by address.
        num_bytes: size of either.
        fence: what its last user left to be waited for, if anything; see ``BlockRing``.
        in_use: between ``BlockRing.acquire`` and ``BlockRing.release``.
    """

    def __init__(
        self, index: int, host: Tensor, device: Tensor, device_address: int | None = None
    ) -> None:
        self.index = index
        self.host = host
        self.device = device
        self.is_shared = device is host
        self.memories = (host,) if self.is_shared else (host, device)
        self.host_address = host.data_ptr()
        self.device_address = device.data_ptr() if device_address is None else device_address
        self.num_bytes = len(host)
        self._host_words = host.numpy().view(np.int32)  # once: ``numpy()`` is a torch op
        self.words = self.open()
        self.fence: Event | None = None
        self.in_use = False

    def open(self) -> NDArray[np.int32]:
        """Give the host side to a new user, writable."""
        self.words = self._host_words.view()
        return self.words

    def freeze(self) -> None:
        """Make ``words`` read-only: a write by its last user raises ValueError from now on."""
        self.words.setflags(write=False)


class Lane(Protocol):
    """An ordered queue of device work."""

    def submit(
        self,
        fn: Callable[..., None],
        *args: object,
        reads: tuple[Tensor, ...] = (),
        writes: tuple[Tensor, ...] = (),
    ) -> None:
        """Queue ``fn(*args)``. The arguments belong to the work from now on.

        ``reads`` and ``writes`` name the memory that crosses lanes or leaves the
        device; devices that check use them.
        """
        ...

    def download(self, block: TransferBlock, begin: int, end: int) -> None:
        """Queue a copy of a range of a block's bytes from the device to the host."""
        ...

    def record(self) -> Event:
        """Return the present end of the queue."""
        ...

    def wait(self, event: Event) -> None:
        """Do nothing further in this lane before ``event``; the caller does not block."""
        ...


class Device(Protocol):
    """Two lanes, the memory between host and device, and the device's own by tag."""

    compute: Lane
    copy: Lane
    torch_device: torch.device
    memory: TaggedMemory

    def host_block(self, num_bytes: int) -> Tensor:
        """Return host memory, uint8 [num_bytes], that the device can copy from and to."""
        ...

    def address_of(self, host_block: Tensor) -> int | None:
        """Return where the device itself reads a host block; None if it cannot."""
        ...

    def device_block(self, num_bytes: int) -> Tensor:
        """Return zeroed device memory, uint8 [num_bytes], that the compute lane may use at once."""
        ...

    def recycle(self, block: Tensor) -> None:
        """Called when a ring takes ``block`` back and before it hands it out again."""
        ...

    def register_state(self, *tensors: Tensor) -> None:
        """Declare engine state: memory that outlives steps, changed on the compute lane only."""
        ...

    def adopt_thread(self) -> AbstractContextManager[None]:
        """Make submitting cheaper for the calling thread, which does nothing else on the device."""
        ...

    def close(self) -> None:
        """End the lanes."""
        ...


def upload(block: TransferBlock, num_bytes: int) -> None:
    """Copy, as work of a lane. It has read memory that is not pinned when it returns."""
    block.device[:num_bytes].copy_(block.host[:num_bytes], non_blocking=True)


def download(block: TransferBlock, begin: int, end: int) -> None:
    """Copy, as work of a lane that has no better way."""
    block.host[begin:end].copy_(block.device[begin:end], non_blocking=True)


class _DoneEvent:
    def wait(self) -> None:
        """Nothing is left to wait for."""


class InlineLane:
    """Runs work when it is submitted, on the submitting thread."""

    _done = _DoneEvent()

    def submit(
        self,
        fn: Callable[..., None],
        *args: object,
        reads: tuple[Tensor, ...] = (),
        writes: tuple[Tensor, ...] = (),
    ) -> None:
        """Run ``fn(*args)``."""
        fn(*args)

    def download(self, block: TransferBlock, begin: int, end: int) -> None:
        """See ``Lane``."""
        self.submit(download, block, begin, end, reads=(block.device,), writes=(block.host,))

    def record(self) -> Event:
        """Return an event that has happened."""
        return self._done

    def wait(self, event: Event) -> None:
        """Return at once: whatever was submitted before is done."""


class CpuDevice:
    """The host as a device, work done inline: threads gain nothing for small models."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.compute: Lane = InlineLane()
        self.copy: Lane = InlineLane()
        self.memory: TaggedMemory = host_memory()

    def host_block(self, num_bytes: int) -> Tensor:
        """Return plain memory; there is nothing to pin."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def address_of(self, host_block: Tensor) -> int | None:
        """Return where it lies."""
        return host_block.data_ptr()

    def device_block(self, num_bytes: int) -> Tensor:
        """Return plain memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def recycle(self, block: Tensor) -> None:
        """Nothing to do."""

    def register_state(self, *tensors: Tensor) -> None:
        """Nothing to check."""

    def adopt_thread(self) -> AbstractContextManager[None]:
        """Nothing to prepare."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to end."""


class _ThreadEvent:
    def __init__(self, lane: "ThreadLane") -> None:
        self.happened = threading.Event()
        self._lane = lane

    def wait(self) -> None:
        if not self.happened.wait(WAIT_SECONDS):
            raise DeviceError(f"lane {self._lane.name} did nothing for {WAIT_SECONDS:g} s")
        if self._lane.failure is not None:
            raise DeviceError(f"work on lane {self._lane.name} failed") from self._lane.failure


class ThreadLane:
    """Runs work on a thread of its own, in order. After a failure only events pass."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"dovetail-{name}", daemon=True)
        self._thread.start()

    def submit(
        self,
        fn: Callable[..., None],
        *args: object,
        reads: tuple[Tensor, ...] = (),
        writes: tuple[Tensor, ...] = (),
    ) -> None:
        """Queue ``fn(*args)``."""
        self._work.put(lambda: fn(*args))

    def download(self, block: TransferBlock, begin: int, end: int) -> None:
        """See ``Lane``."""
        self.submit(download, block, begin, end, reads=(block.device,), writes=(block.host,))

    def record(self) -> Event:
        """Return an event that the thread sets when it gets there."""
        event = _ThreadEvent(self)
        self._work.put(event.happened.set)
        return event

    def wait(self, event: Event) -> None:
        """Queue a wait for the other lane's event."""
        self._work.put(event.wait)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            is_event = getattr(work, "__self__", None).__class__ is threading.Event
            if self.failure is not None and not is_event:
                continue
            try:
                work()
            except BaseException as error:  # handed to whoever waits for this lane
                self.failure = error


class ThreadedCpuDevice:
    """The host as a device with real concurrency between lanes: a test mode."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._lanes = (ThreadLane("compute"), ThreadLane("copy"))
        self.compute: Lane = self._lanes[0]
        self.copy: Lane = self._lanes[1]
        self.memory: TaggedMemory = host_memory()

    def host_block(self, num_bytes: int) -> Tensor:
        """Return plain memory; there is nothing to pin."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def address_of(self, host_block: Tensor) -> int | None:
        """Return where it lies."""
        return host_block.data_ptr()

    def device_block(self, num_bytes: int) -> Tensor:
        """Return plain memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def recycle(self, block: Tensor) -> None:
        """Nothing to do."""

    def register_state(self, *tensors: Tensor) -> None:
        """Nothing to check."""

    def adopt_thread(self) -> AbstractContextManager[None]:
        """Nothing to prepare."""
        return nullcontext()

    def close(self) -> None:
        """End both threads."""
        for lane in self._lanes:
            lane.close()
