"""One NVIDIA GPU as a device: two streams, their events, and host memory that it can reach.

Owns the streams and the pinned blocks. Work runs at submission, with the lane's stream current, so
what it launches is queued there. Must not know what the work does.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import DeviceError, InvariantError
from dovetail.exec.cuda.calls import DriverCalls, driver_calls
from dovetail.exec.cuda.driver import tagged_memory
from dovetail.exec.device import WAIT_SECONDS, Event, Lane, TransferBlock
from dovetail.exec.memory import TaggedMemory

_MAPPED = 2
"""cudaHostRegisterMapped: the GPU may read the memory where it lies, as it does packets."""

_FAULTS = (torch.AcceleratorError, torch.OutOfMemoryError)
_FAULT_WORDS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
"""What a launch raises when the GPU has failed or is full. Triton and what calls cuBLAS have no
class of error for it, only words at its beginning."""


class CudaEvent:
    """A point in a stream.

    Args:
        calls: to the GPU.
        handle: the driver's event, recorded.
        free: where that goes when nobody asks for the point any more.
        name: of the lane.
    """

    def __init__(self, calls: DriverCalls, handle: int, free: list[int], name: str) -> None:
        self._calls = calls
        self.handle = handle
        self._free = free
        self._name = name

    def __del__(self) -> None:
        self._free.append(self.handle)

    @property
    def has_happened(self) -> bool:
        """Whether the GPU has come to the point.

        Raises:
            DeviceError: it failed before.
        """
        return self._calls.has_happened(self.handle)

    def wait(self) -> None:
        """Block until the point is reached; other threads of Python go on.

        Asks again and again: CUDA's own wait has no limit of time.
        """
        if self._calls.has_happened(self.handle):
            return
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.has_happened:
            if time.monotonic() > deadline:
                raise DeviceError(f"lane {self._name} did nothing for {WAIT_SECONDS:g} s")
            time.sleep(0)


class CudaLane:
    """A stream. A fault of the GPU is raised at the submission or the wait that meets it."""

    def __init__(self, name: str, device: torch.device, calls: DriverCalls) -> None:
        self.name = name
        self.stream = torch.cuda.Stream(device)
        self._handle = self.stream.cuda_stream
        self._calls = calls
        self._adopted: int | None = None
        self._free_events: list[int] = []

    def submit(
        self,
        fn: Callable[..., None],
        *args: object,
        reads: tuple[Tensor, ...] = (),
        writes: tuple[Tensor, ...] = (),
    ) -> None:
        """Run ``fn(*args)``, whose launches go to the stream.

        Raises:
            DeviceError: the GPU failed or is out of memory.
        """
        try:
            if threading.get_ident() == self._adopted:
                fn(*args)
            else:
                with torch.cuda.stream(self.stream):
                    fn(*args)
        except RuntimeError as error:
            if not isinstance(error, _FAULTS) and not str(error).startswith(_FAULT_WORDS):
                raise
            raise DeviceError(f"work on lane {self.name} failed: {error}") from error

    def download(self, block: TransferBlock, begin: int, end: int) -> None:
        """See ``Lane``. To memory that is not pinned all of Python waits for the copy.

        Raises:
            DeviceError: the GPU failed.
        """
        source, target = block.device_address + begin, block.host_address + begin
        self._calls.download(source, target, end - begin, self._handle)

    @contextlib.contextmanager
    def adopt_thread(self) -> Iterator[None]:
        """Let the stream be the calling thread's current one meanwhile.

        To change it for each step, and back, costs the host 30 us.
        """
        with torch.cuda.stream(self.stream):
            self._adopted = threading.get_ident()
            try:
                yield
            finally:
                self._adopted = None

    def record(self) -> Event:
        """Return the present end of the stream."""
        handle = self._free_events.pop() if self._free_events else self._calls.new_event()
        self._calls.record(handle, self._handle)
        return CudaEvent(self._calls, handle, self._free_events, self.name)

    def wait(self, event: Event) -> None:
        """Let the stream wait for another one's event."""
        if not isinstance(event, CudaEvent):
            raise InvariantError("a CUDA lane can wait for events of CUDA lanes only")
        self._calls.wait(self._handle, event.handle)

    def close(self) -> None:
        """Let all work end."""
        self.record().wait()
        while self._free_events:
            self._calls.destroy_event(self._free_events.pop())


class CudaDevice:
    """A GPU with a compute and a copy lane.

    Attributes:
        num_unpinned: host blocks that could not be pinned. Copies from and to them are right, but
            all of Python waits for them, and packets take a copy more. ``doctor`` tells whether
            that is so here.
    """

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        calls = self._calls = driver_calls(self.torch_device)
        lanes = (
            CudaLane("compute", self.torch_device, calls),
            CudaLane("copy", self.torch_device, calls),
        )
        # PyTorch hands out streams of a pool in turn, so two of them may be the same one.
        if lanes[0].stream.cuda_stream == lanes[1].stream.cuda_stream:
            raise InvariantError("both lanes got the same CUDA stream")
        self._lanes = lanes
        self.compute: Lane = lanes[0]
        self.copy: Lane = lanes[1]
        self.memory: TaggedMemory = tagged_memory(self.torch_device)
        self._pinned: list[Tensor] = []
        # Also if nobody closes it: memory that is freed pinned cannot be pinned by the next owner.
        self._unpin = weakref.finalize(self, _unpin, self._pinned)
        self.num_unpinned = 0

    def host_block(self, num_bytes: int) -> Tensor:
        """Return host memory of exactly this size, pinned if that can be had.

        PyTorch's own pinned memory comes in powers of two, and is shared with whoever else asks.
        """
        block = torch.zeros(num_bytes, dtype=torch.uint8)
        runtime: Any = torch.cuda.cudart()  # a module without types
        if int(runtime.cudaHostRegister(block.data_ptr(), num_bytes, _MAPPED)) == 0:
            self._pinned.append(block)
        else:
            self.num_unpinned += 1
            self._take_error()
        return block

    def address_of(self, host_block: Tensor) -> int | None:
        """Return where the GPU reads a host block; None if that could not be pinned."""
        if not any(pinned is host_block for pinned in self._pinned):
            return None
        return self._calls.address_of(host_block.data_ptr())

    def _take_error(self) -> None:
        """CUDA hands a refusal to the next launch as well; let that be one of no importance."""
        with contextlib.suppress(torch.AcceleratorError):
            torch.zeros(1, device=self.torch_device)

    def release_host_block(self, block: Tensor) -> None:
        """Unpin a host block that nothing on the device uses any more."""
        runtime: Any = torch.cuda.cudart()
        for index, pinned in enumerate(self._pinned):
            if pinned is block:
                runtime.cudaHostUnregister(self._pinned.pop(index).data_ptr())
                return

    def device_block(self, num_bytes: int) -> Tensor:
        """Return zeroed memory; zeroed on the compute lane, so that its work comes after."""
        with torch.cuda.stream(self._lanes[0].stream):
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def recycle(self, block: Tensor) -> None:
        """Nothing to do."""

    def register_state(self, *tensors: Tensor) -> None:
        """Nothing to check; ``exec.sim`` does."""

    def adopt_thread(self) -> contextlib.AbstractContextManager[None]:
        """Let whatever the calling thread launches go to the compute lane."""
        return self._lanes[0].adopt_thread()

    def close(self) -> None:
        """Let both lanes end, then give the host's memory back."""
        for lane in self._lanes:
            lane.close()
        self._unpin()


def _unpin(blocks: list[Tensor]) -> None:
    runtime: Any = torch.cuda.cudart()
    for block in blocks:
        runtime.cudaHostUnregister(block.data_ptr())
    blocks.clear()
