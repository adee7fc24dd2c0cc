"""Shaped draws recorded as CUDA graphs, one for each graph of a forward.

Owns the graphs and the memory that they share. A draw reads the logits where its forward leaves
them, so it is recorded after that; it is a dozen launches, and recorded in milliseconds.
"""

from collections.abc import Callable, Mapping

import torch

from dovetail.exec.cuda.graphs import no_collection
from dovetail.exec.cuda.step import Forwarded, StepShape
from dovetail.kernels.backend import PlainDraws


class ShapedGraphs:
    """The graphs of one runner. Compute lane only."""

    def __init__(self) -> None:
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, PlainDraws]] = {}

    def record(
        self,
        draw: Callable[[Forwarded], PlainDraws],
        draw_alone: Callable[[Forwarded], PlainDraws],
        forwards: Mapping[StepShape, Forwarded],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Record ``draw`` of what each recorded forward leaves.

        Args:
            draw: see ``CudaRunner.draw_shaped``.
            draw_alone: the same, run before it is recorded; its memory is the step's.
            forwards: what the recorded forwards leave, the largest first of each kind.
            on_progress: see ``CudaGraphs.record``.
        """
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
        with no_collection():
            for shape, forwarded in forwards.items():
                draw_alone(forwarded)  # compiles
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ):
                    draws = draw(forwarded)
                self._graphs[shape] = graph, draws
                on_progress(len(self._graphs), len(forwards))

    def replay(self, shape: StepShape) -> PlainDraws | None:
        """Draw for a step that was forwarded by its graph; None if nothing was recorded for it.

        What it returns holds until the next replay.
        """
        if shape not in self._graphs:
            return None
        graph, draws = self._graphs[shape]
        graph.replay()
        return draws
