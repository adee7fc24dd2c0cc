"""Expert rows that routers write to the sidecars themselves, at the tokens' cache slots.

Owns which sidecar takes which number. One kernel chooses and records, so nothing is copied from a
buffer afterwards, and a CUDA graph may hold it. Must not know pages or requests.

Shape legend: C cache slots, T tokens, K experts of a token.
"""

from collections.abc import Mapping

from torch import Tensor

from dovetail.capture.sidecar import Sidecar
from dovetail.kernels.backend import Capture


class DirectRecorder:
    """An ``ExpertRecorder`` of one step.

    Args:
        sidecars: column -> its rows; those that no router writes are left alone.
        kv_slots_T: the tokens' cache slots; the sink for padding.
    """

    def __init__(self, sidecars: Mapping[str, Sidecar], kv_slots_T: Tensor) -> None:
        self._experts = sidecars.get("experts")
        self._weights = sidecars.get("expert_weights")
        self._kv_slots = kv_slots_T

    def direct(self, moe_layer: int) -> Capture | None:
        """See ``ExpertRecorder``."""
        if self._experts is None:
            return None
        return Capture(self._experts.rows, self._kv_slots, moe_layer)

    def record(self, moe_layer: int, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Store the weights; the ids are there already."""
        if self._weights is not None:
            self._weights.rows[:, moe_layer].index_copy_(0, self._kv_slots, weights_TK)
