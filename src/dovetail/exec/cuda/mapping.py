"""Tagged memory on a GPU, by virtual memory mapping: addresses stay, what lies behind them goes.

Owns the bookkeeping. Addresses are reserved in long *spans*, tensors are laid into a span one after
the other, and memory is mapped behind a span as far as tensors reach. A span is freed when the last
of its tensors is gone. Must not know CUDA: that is the business of a ``MappingDriver``.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dovetail.errors import DeviceError, InvariantError
from dovetail.exec.memory import Tag

SPAN_BYTES = 2**30
"""Addresses that are reserved at once; addresses cost nothing."""

_ALIGN = 512


class MappingDriver(Protocol):
    """What a device must be able to do. Sizes are multiples of ``granularity``."""

    granularity: int

    def reserve(self, num_bytes: int) -> int:
        """Return an address from which on so many bytes are nobody else's."""
        ...

    def free(self, address: int, num_bytes: int) -> None:
        """Give reserved addresses back, behind which nothing is mapped."""
        ...

    def map(self, address: int, num_bytes: int) -> None:
        """Put new memory behind addresses.

        Raises:
            DeviceError: there is not so much.
        """
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Take the memory away that one ``map`` put there; waits for all work of the device."""
        ...

    def view(self, address: int, num_bytes: int, owner: object) -> Tensor:
        """Return mapped memory as a tensor, uint8; ``owner`` lives as long as it or a view."""
        ...


class _Span:
    """Reserved addresses, and the pieces of them that have memory.

    Attributes:
        pieces: (offset, bytes) of each piece, one after the other; they keep their borders.
        end: how far tensors reach.
    """

    def __init__(self, driver: MappingDriver, num_bytes: int) -> None:
        self._driver = driver
        self.num_bytes = num_bytes
        self.address = driver.reserve(num_bytes)
        self.pieces: list[tuple[int, int]] = []
        self.end = 0
        mapped = self._mapped = list[tuple[int, int]]()  # those of ``pieces`` that have memory now
        finalizer = weakref.finalize(self, _free, driver, self.address, num_bytes, mapped)
        finalizer.atexit = False  # the process's end frees all, and its driver may be gone

    @property
    def mapped_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._mapped)

    def has_room(self, num_bytes: int) -> bool:
        return _aligned(self.end, _ALIGN) + num_bytes <= self.num_bytes

    def take(self, num_bytes: int) -> int:
        """Return the address of so many bytes, mapped and nobody's yet."""
        offset = _aligned(self.end, _ALIGN)
        reached = sum(num_bytes for _, num_bytes in self.pieces)
        missing = _aligned(max(0, offset + num_bytes - reached), self._driver.granularity)
        if missing:
            self._map((reached, missing))
            self.pieces.append((reached, missing))
        self.end = offset + num_bytes
        return self.address + offset

    def unmap(self) -> int:
        num_bytes = self.mapped_bytes
        _unmap(self._driver, self.address, self._mapped)
        return num_bytes

    def map(self) -> None:
        for piece in self.pieces[len(self._mapped) :]:
            self._map(piece)

    def _map(self, piece: tuple[int, int]) -> None:
        offset, num_bytes = piece
        self._driver.map(self.address + offset, num_bytes)
        self._mapped.append(piece)


def _unmap(driver: MappingDriver, address: int, mapped: list[tuple[int, int]]) -> None:
    while mapped:
        offset, num_bytes = mapped[-1]
        driver.unmap(address + offset, num_bytes)
        mapped.pop()


def _free(
    driver: MappingDriver, address: int, num_bytes: int, mapped: list[tuple[int, int]]
) -> None:
    _unmap(driver, address, mapped)
    driver.free(address, num_bytes)


class MappedMemory:
    """A ``TaggedMemory`` whose memory can be unmapped.

    Args:
        driver: of the device.
        span_bytes: see ``SPAN_BYTES``.
    """

    can_unmap = True
    reason = "virtual memory mapping"

    def __init__(self, driver: MappingDriver, *, span_bytes: int = SPAN_BYTES) -> None:
        self._driver = driver
        self._span_bytes = span_bytes
        self._spans: dict[Tag, list[weakref.ref[_Span]]] = {}
        self._unmapped: set[Tag] = set()

    def zeros(self, tag: Tag, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See ``TaggedMemory``."""
        if tag in self._unmapped:
            raise InvariantError(f"memory of {tag} is asked for while it is unmapped")
        num_bytes = max(1, math.prod(shape) * dtype.itemsize)
        spans = self._spans_of(tag)
        span = next((span for span in reversed(spans) if span.has_room(num_bytes)), None)
        if span is None:
            granularity = self._driver.granularity
            span = _Span(self._driver, _aligned(max(num_bytes, self._span_bytes), granularity))
            self._spans[tag].append(weakref.ref(span))
        data = self._driver.view(span.take(num_bytes), num_bytes, span).zero_()
        return data[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def num_bytes(self, tag: Tag) -> int:
        """See ``TaggedMemory``; whole pieces count."""
        return sum(span.mapped_bytes for span in self._spans_of(tag))

    def unmap(self, tag: Tag) -> int:
        """See ``TaggedMemory``."""
        self._unmapped.add(tag)
        return sum(span.unmap() for span in self._spans_of(tag))

    def map(self, tag: Tag) -> int:
        """See ``TaggedMemory``."""
        before, spans = self.num_bytes(tag), self._spans_of(tag)
        try:
            for span in spans:
                span.map()
        except DeviceError:
            for span in spans:
                span.unmap()
            raise
        self._unmapped.discard(tag)
        return self.num_bytes(tag) - before

    def _spans_of(self, tag: Tag) -> list[_Span]:
        """Return the spans whose tensors are not all gone."""
        references = self._spans.get(tag, [])
        alive = [(reference, span) for reference in references if (span := reference()) is not None]
        self._spans[tag] = [reference for reference, _ in alive]
        return [span for _, span in alive]


def _aligned(number: int, unit: int) -> int:
    return -(-number // unit) * unit
