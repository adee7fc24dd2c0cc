"""What the routers of the running forward write.

Owns fixed-address buffers, one row for each forwarded token, which each forward writes anew: sized
by the largest forward there can be, so no chunk is too long for them. From here the rows go to the
sidecars (by cache slot) and, where a step asks, into its snapshot. Must not know slots or requests.

Shape legend: T tokens, L MoE layers, K experts of a token.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from dovetail.capture.sidecar import poison_all, row_dtype
from dovetail.config.capture import ColumnSpec
from dovetail.kernels import api
from dovetail.kernels.backend import Capture


class ExpertRecorder(Protocol):
    """What a router may know of capture."""

    def direct(self, moe_layer: int) -> Capture | None:
        """Return where the choice itself writes the ids; None leaves that to ``record``."""
        ...

    def record(self, moe_layer: int, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Take down what the choice has not written of the step's tokens.

        Args:
            moe_layer: number of the layer among those with experts.
            ids_TK: int64 or int32, logical ids in the router's order, before any remapping.
            weights_TK: float32, as the experts' outputs are weighted.
        """
        ...


class StepRows:
    """The rows of one forward; an ``ExpertRecorder``.

    Engine state: changed on the compute lane only. A row that no router wrote is poison, not that
    of the forward before.

    Attributes:
        buffers: column -> [most tokens, L, K].
    """

    def __init__(
        self, specs: Mapping[str, ColumnSpec], max_tokens: int, *, device: torch.device
    ) -> None:
        self._specs = specs
        self.buffers = {
            name: torch.empty(max_tokens, *spec.shape, dtype=row_dtype(spec), device=device)
            for name, spec in specs.items()
        }
        for name, buffer in self.buffers.items():
            poison_all(buffer, specs[name])

    def begin(self, num_tokens: int) -> None:
        """Forget the rows of the forward before."""
        for name, buffer in self.buffers.items():
            api.fill_rows(buffer, slice(num_tokens), self._specs[name].poison)

    def direct(self, moe_layer: int) -> Capture | None:
        """Return None: the rows lie by token here, not by cache slot."""

    def record(self, moe_layer: int, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """See ``ExpertRecorder``."""
        for name, values_TK in (("experts", ids_TK), ("expert_weights", weights_TK)):
            if name in self.buffers:
                api.store_layer(self.buffers[name], moe_layer, values_TK)
