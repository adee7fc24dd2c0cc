"""Decode steps recorded as CUDA graphs, one for each tier of rows.

Owns the tiers, the graphs and the memory that they share. A graph reads and writes fixed addresses
alone: whatever differs from step to step lies in the inputs, which are filled before a replay.
"""

from collections.abc import Callable

import torch

from dovetail.exec.cuda.step import Forwarded, StepShape

_SMALL = (1, 2, 4)
_FINE, _FINE_TO, _COARSE = 8, 64, 32
"""Tiers are 8 rows apart, from 64 rows on 32: a padded row costs its share of the step."""


def decode_tiers(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows that have a graph, ascending; the last one is ``max_rows``."""
    tiers = (*_SMALL, *range(_FINE, _FINE_TO, _FINE), *range(_FINE_TO, max_rows, _COARSE))
    return (*(tier for tier in tiers if tier < max_rows), max_rows)


class DecodeGraphs:
    """The graphs of one runner. Compute lane only."""

    def __init__(self, max_rows: int) -> None:
        self._tiers = decode_tiers(max_rows)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Forwarded]] = {}

    def record(self, forward: Callable[[StepShape], Forwarded]) -> None:
        """Record ``forward`` for all tiers, the largest first: the others fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        for tier in reversed(self._tiers):
            forward(_shape(tier))  # compiles, and allocates what is allocated once
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                forwarded = forward(_shape(tier))
            self._graphs[tier] = graph, forwarded

    def padded(self, shape: StepShape) -> StepShape | None:
        """Return the shape of the graph that serves a step; None if none does."""
        if shape.num_tiles or not self._graphs or shape.num_rows > self._tiers[-1]:
            return None
        return _shape(next(tier for tier in self._tiers if tier >= shape.num_rows))

    def replay(self, padded: StepShape) -> Forwarded:
        """Run a graph; what it returns holds until the next replay."""
        graph, forwarded = self._graphs[padded.num_rows]
        graph.replay()
        return forwarded


def _shape(num_rows: int) -> StepShape:
    return StepShape(num_rows, num_rows, num_decode=num_rows, num_tiles=0)
