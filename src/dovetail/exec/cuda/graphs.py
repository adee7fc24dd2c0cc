"""Steps recorded as CUDA graphs, by tiers of rows and of tokens.

Owns the tiers, the graphs and the memory that they share. A graph holds a step from its packet to
its result block. It reads and writes fixed addresses alone: whatever differs from step to step lies
in the packet, which the step fetches first.

Decode steps have a graph for each tier of rows. Steps with prompt chunks have one for each tier of
tokens, whatever the mix of rows; above the last tier the GPU is slower than the launching thread,
and nothing is gained: such steps are padded a little and run by themselves.
"""

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from dovetail.exec.cuda.address import view_of
from dovetail.exec.cuda.step import Forwarded, StepShape
from dovetail.kernels.backend import PlainDraws

_SMALL = (1, 2, 4)
_FINE, _FINE_TO, _COARSE = 8, 64, 32
"""Decode tiers are 8 rows apart, from 64 rows on 32: a padded row costs its share of the step."""

_TOKENS, _MAX_TOKENS = 256, 2048
"""How far apart tiers of tokens are, and the last."""

_ROUND = 64
"""To what steps above the last tier are padded. Each new shape costs a choice of a matrix product,
and some a compilation, so there had better be few."""


class StepGraphs(Protocol):
    """Whoever can run a padded step as a whole."""

    def padded(self, shape: StepShape) -> StepShape:
        """Return the shape to which a step is padded."""
        ...

    def replay(self, padded: StepShape) -> Forwarded | None:
        """Run what was recorded; what it returns holds until the next replay.

        None if nothing was: the step must be run by itself.
        """
        ...


def decode_tiers(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows that have a graph, ascending; the last one is ``max_rows``."""
    tiers = (*_SMALL, *range(_FINE, _FINE_TO, _FINE), *range(_FINE_TO, max_rows, _COARSE))
    return (*(tier for tier in tiers if tier < max_rows), max_rows)


def token_tiers(max_rows: int, max_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens that have a graph, ascending; each row fits into the least."""
    last = min(max_tokens, max(_MAX_TOKENS, max_rows))
    tiers = [tier for tier in range(_TOKENS, last, _TOKENS) if tier >= max_rows]
    return (*tiers, last)


class Tiers:
    """Which shapes are recorded.

    Args:
        max_rows, max_tokens: the largest step.
        tile_tokens: see ``QueryTiles.max_tokens``.
    """

    def __init__(self, *, max_rows: int, max_tokens: int, tile_tokens: int) -> None:
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._tile_tokens = tile_tokens
        self._decode = decode_tiers(max_rows)
        self._tokens = token_tiers(max_rows, max_tokens)

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """All of them, the largest first of each kind."""
        return (
            *(self._mixed(tier) for tier in reversed(self._tokens)),
            *(_decode_shape(tier) for tier in reversed(self._decode)),
        )

    def padded(self, shape: StepShape) -> StepShape:
        """Return the least recorded shape that holds a step; a rounded one if none does."""
        if not shape.num_tiles:
            return _decode_shape(self._decode[bisect_left(self._decode, shape.num_rows)])
        fitting = (tier for tier in self._tokens if tier >= shape.num_tokens)
        rounded = -(-shape.num_tokens // _ROUND) * _ROUND
        return self._mixed(next(fitting, min(rounded, self._max_tokens)))

    def _mixed(self, num_tokens: int) -> StepShape:
        num_tiles = self._max_rows + -(-num_tokens // self._tile_tokens)
        return StepShape(self._max_rows, num_tokens, self._max_rows, num_tiles)


class CudaGraphs:
    """The graphs of one runner; a ``StepGraphs``. Compute lane only."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Forwarded]] = {}

    def record(
        self,
        step: Callable[[StepShape], Forwarded],
        step_alone: Callable[[StepShape], Forwarded],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Record ``step`` for all tiers, the largest first: the others fit into its memory.

        Args:
            step: see ``CudaRunner.step``.
            step_alone: the same, run before it is recorded; its memory is the step's.
            on_progress: told after each how many are done, and how many there are.
        """
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        with no_collection():
            for shape in self._tiers.shapes:
                step_alone(shape)  # compiles, and allocates what is allocated once
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ):
                    forwarded = step(shape)
                self._graphs[shape] = graph, _without_memory(forwarded)
                del forwarded  # before the next one is recorded
                on_progress(len(self._graphs), len(self._tiers.shapes))

    @property
    def forwards(self) -> dict[StepShape, Forwarded]:
        """What each recorded forward leaves, in the order of recording."""
        return {shape: forwarded for shape, (_, forwarded) in self._graphs.items()}

    def padded(self, shape: StepShape) -> StepShape:
        """See ``StepGraphs``."""
        return self._tiers.padded(shape)

    def replay(self, padded: StepShape) -> Forwarded | None:
        """See ``StepGraphs``."""
        recorded = self._graphs.get(padded)
        if recorded is None:
            return None
        graph, forwarded = recorded
        graph.replay()
        return forwarded


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: to free another engine's graphs ends a recording."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _without_memory(forwarded: Forwarded) -> Forwarded:
    """Return the same places, which the graphs that are recorded next may write to as well.

    Logits of every tier beside each other would take gigabytes. What a graph leaves is read before
    the next replay.
    """
    return Forwarded(
        hidden_TM=view_of(forwarded.hidden_TM),
        logits_RV=view_of(forwarded.logits_RV),
        is_spoilt_T=view_of(forwarded.is_spoilt_T),
        draws=PlainDraws(*map(view_of, forwarded.draws)),
    )


def _decode_shape(num_rows: int) -> StepShape:
    return StepShape(num_rows, num_rows, num_decode=num_rows, num_tiles=0)
