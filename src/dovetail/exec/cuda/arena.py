"""The memory of what a step computes in between: one piece, which each step has to itself.

PyTorch's allocator takes memory in segments, each as large as what was asked for, and cuts them up
for whoever asks for less. Where sizes differ from step to step the pieces fit nobody, and it takes
more, with no end that could be foreseen. Here a step allocates from one segment, which nobody else
uses. It leaves nothing behind, so the next one finds the segment whole again: whether there is
enough depends on one step alone, never on those before, and can be tried out at start.

Owns the segment and its size. Must not know what a step computes.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

T = TypeVar("T")


class StepMemory(Protocol):
    """Where a step's tensors lie. Compute lane only.

    Attributes:
        is_reserved: whether ``fit`` reserves anything.
        reason: why it does, or does not.
    """

    is_reserved: bool
    reason: str

    def run(self, fn: Callable[..., T], *args: object) -> T:
        """Return ``fn(*args)``, whose allocations come from here.

        What it allocates must be gone when the step is.
        """
        ...

    def settle(self) -> None:
        """Give back what exceeds the reserve; called between steps."""
        ...

    def fit(self, work: Callable[[], object]) -> None:
        """Run what a step may run, and reserve what it needs.

        Raises:
            torch.OutOfMemoryError: there is not so much.
        """
        ...


class PlainStepMemory:
    """What PyTorch's allocator gives, without a reserve; a ``StepMemory``."""

    is_reserved = False

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def run(self, fn: Callable[..., T], *args: object) -> T:
        """See ``StepMemory``."""
        return fn(*args)

    def fit(self, work: Callable[[], object]) -> None:
        """See ``StepMemory``; the allocator keeps what it took."""
        work()

    def settle(self) -> None:
        """Nothing is kept for steps."""


class Segments(Protocol):
    """Segments of a device for one purpose."""

    def use(self) -> AbstractContextManager[None]:
        """Let this thread allocate from them, and from new ones where they do not do."""
        ...

    def num_bytes(self) -> int:
        """Return the bytes that they take of the device; a few MiB of the smallest do not count."""
        ...

    def renew(self, num_bytes: int) -> None:
        """Give all of them back and take one of so many bytes.

        Raises:
            torch.OutOfMemoryError: there is not so much.
        """
        ...


class StepArena:
    """One segment for all steps; a ``StepMemory``.

    Attributes:
        num_bytes: of the segment; 0 before ``fit``, when segments come and stay as they are needed.
        num_overflows: how many steps needed more, which was given back behind them.
    """

    is_reserved = True
    reason = "steps differ in size, and would break up the memory that they share"

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._was_used = False
        self.num_bytes = 0
        self.num_overflows = 0

    def run(self, fn: Callable[..., T], *args: object) -> T:
        """See ``StepMemory``."""
        self._was_used = True
        with self._segments.use():
            return fn(*args)

    def settle(self) -> None:
        """See ``StepMemory``."""
        if not self._was_used or not self.num_bytes:
            return
        self._was_used = False
        if self._segments.num_bytes() > self.num_bytes:
            self.num_overflows += 1
            self._segments.renew(self.num_bytes)

    def fit(self, work: Callable[[], object]) -> None:
        """See ``StepMemory``; from now on the segment is that large."""
        self.run(work)
        needed = self._segments.num_bytes()
        if needed > self.num_bytes:
            self._segments.renew(needed)
            self.num_bytes = needed


class CudaSegments:
    """A private pool of PyTorch's own allocator. One stream; a thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.MemPool()
        self._thread = threading.local()
        self._known = (-1, 0)  # what the allocator had taken when the pool's bytes were counted

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """See ``Segments``."""
        self._take_work_space()
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def num_bytes(self) -> int:
        """See ``Segments``."""
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
        taken = stats["reserved_bytes"]["large_pool"]["allocated"]  # of all pools, ever
        if taken != self._known[0]:  # else nobody has taken a segment, and to look is dear
            large = (s for s in self._pool.snapshot() if s["segment_type"] == "large")
            self._known = taken, sum(segment["total_size"] for segment in large)
        return self._known[1]

    def renew(self, num_bytes: int) -> None:
        """See ``Segments``."""
        del self._pool  # with it go its segments
        self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, self._device):
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._known = (-1, 0)

    def _take_work_space(self) -> None:
        """Let cuBLAS take, for this thread and stream, what it keeps for ever: not from the pool.

        It does so at the first product, with a bias at another one, and in the midst of the pool it
        would cut it in two.
        """
        if getattr(self._thread, "is_known", False):
            return
        x = torch.zeros(16, 16, dtype=torch.bfloat16, device=self._device)
        F.linear(x, x)
        F.linear(x, x, x[0])
        self._thread.is_known = True


def step_memory(device: torch.device) -> StepMemory:
    """Return the memory of a GPU's steps."""
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        return PlainStepMemory(f"PyTorch's allocator is {backend}, which has no segments")
    stats = torch.cuda.memory.memory_stats_as_nested_dict(device)
    if stats.get("max_split_size", -1) > 0:
        return PlainStepMemory("PYTORCH_ALLOC_CONF asks that large segments are not cut")
    return StepArena(CudaSegments(device))
