"""Times of a GPU's lanes: CUDA events, laid on the host's time axis.

Owns the origin, an event and a host time of the same moment. Two clocks drift apart by some
microseconds a second, so keep what is traced short.
"""

import time

import torch


class CudaClock:
    """An ``exec.trace.Clock`` of the current stream. Made when the GPU is idle."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()
        self._origin_s = time.perf_counter()

    def stamp(self) -> torch.cuda.Event:
        """Return the present end of the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: torch.cuda.Event) -> float:
        """Return when the stream came to the point, as ``time.perf_counter``."""
        return self._origin_s + self._origin.elapsed_time(stamp) / 1e3
