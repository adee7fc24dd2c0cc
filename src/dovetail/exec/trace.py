"""What runs when: notes of host calls, and of each work on a device's lanes.

Owns the notes. A work's times are taken on its lane, before and behind it, so they are the lane's
own; a clock turns them into host seconds once all is done. Must not know what the work does.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from dovetail.exec.device import Device, Event, Lane, TransferBlock, download

Stamp = TypeVar("Stamp")


class Clock(Protocol[Stamp]):
    """Takes times in the order of the current lane."""

    def stamp(self) -> Stamp:
        """Return the present point of the lane that runs this."""
        ...

    def seconds(self, stamp: Stamp) -> float:
        """Return when the point was reached, as ``time.perf_counter``; all work must be done."""
        ...


class HostClock:
    """For lanes that run on the host."""

    def stamp(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        """Return the time."""
        return stamp


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        row: where it is shown: ``host``, the name of a lane, or ``graph`` for the recorded part of
            a work of the compute lane.
        name: of the call or the work.
        step: how many steps had been planned when it was begun, or submitted.
        begin_s, end_s: as ``time.perf_counter``.
    """

    row: str
    name: str
    step: int
    begin_s: float
    end_s: float


class Recorder(Generic[Stamp]):
    """Notes spans. ``spans`` may be asked for when everything submitted is done.

    Attributes:
        step: the number of the step at hand; whoever plans raises it.
    """

    def __init__(self, clock: Clock[Stamp]) -> None:
        self._clock = clock
        self._host: list[Span] = []
        self._work: list[tuple[str, str, int, Stamp, Stamp]] = []
        self.step = 0

    def call(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn``, noted as host time whenever it is called."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            step, begin_s = self.step, time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                self._host.append(Span("host", name, step, begin_s, time.perf_counter()))

        return noted

    def work(self, lane: str, fn: Callable[..., None]) -> Callable[..., None]:
        """Return the work ``fn``, noted as time of its lane when that runs it."""
        step, name = self.step, getattr(fn, "__name__", "work").strip("_")

        def noted(*args: object) -> None:
            begin = self._clock.stamp()
            fn(*args)
            self._work.append((lane, name, step, begin, self._clock.stamp()))

        return noted

    def replay(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn``, a part of a work that replays a graph, noted as time of the graph.

        For lanes that run work at submission. A call that returns None found none, and counts not.
        """

        def noted(*args: Any) -> Any:
            begin = self._clock.stamp()
            found = fn(*args)
            if found is not None:
                self._work.append(("graph", "replay", self.step, begin, self._clock.stamp()))
            return found

        return noted

    def spans(self) -> list[Span]:
        """Return all that was noted, by their begin."""
        seconds = self._clock.seconds
        work = [
            Span(lane, name, step, seconds(begin), seconds(end))
            for lane, name, step, begin, end in self._work
        ]
        return sorted([*self._host, *work], key=lambda span: span.begin_s)


class TracedLane:
    """A lane whose work is noted."""

    def __init__(self, name: str, lane: Lane, recorder: Recorder[Any]) -> None:
        self._name, self._lane, self._recorder = name, lane, recorder

    def submit(
        self,
        fn: Callable[..., None],
        *args: object,
        reads: tuple[Tensor, ...] = (),
        writes: tuple[Tensor, ...] = (),
    ) -> None:
        """Queue ``fn(*args)``; see ``Lane``."""
        self._lane.submit(self._recorder.work(self._name, fn), *args, reads=reads, writes=writes)

    def download(self, block: TransferBlock, begin: int, end: int) -> None:
        """See ``Lane``."""
        self.submit(download, block, begin, end, reads=(block.device,), writes=(block.host,))

    def record(self) -> Event:
        """See ``Lane``."""
        return self._lane.record()

    def wait(self, event: Event) -> None:
        """See ``Lane``."""
        self._lane.wait(event)


def note_lanes(device: Device, recorder: Recorder[Any]) -> None:
    """Let a device note the work of its lanes from now on; before it is given to an engine."""
    device.compute = TracedLane("compute", device.compute, recorder)
    device.copy = TracedLane("copy", device.copy, recorder)
