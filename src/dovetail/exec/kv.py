"""The device memory behind page ids: keys, values, and per-token sidecars.

Owns the pools of the ``paged`` group, in memory of the tag ``kv``. A cache slot is
``page * page_size + offset``; every tensor here is indexed by it, so whatever happens to a page
happens to all of its columns. Changed on the compute lane only.

Shape legend: L layers, C cache slots, K KV heads, D head dim.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.capture.sidecar import Sidecar, row_dtype
from dovetail.config.schema import EngineConfig
from dovetail.exec.device import Device


class KVStore:
    """KV and sidecars by cache slot.

    Attributes:
        k_LCKD, v_LCKD: the pools, in the model's dtype. The last slot is the sink, as in sidecars.
        sidecars: column -> its rows; ``tokens`` (int32, the input token at each cached position)
            always exists.
    """

    def __init__(self, config: EngineConfig, device: Device) -> None:
        model = config.model
        num_slots = config.num_pages * config.page_size
        shape = (model.num_layers, num_slots + 1, model.num_kv_heads, model.head_dim)
        dtype = getattr(torch, config.dtype)
        zeros = device.memory.zeros
        self.k_LCKD = zeros("kv", shape, dtype)
        self.v_LCKD = zeros("kv", shape, dtype)
        self.sidecars = {
            name: Sidecar(spec, zeros("kv", (num_slots + 1, *spec.shape), row_dtype(spec)))
            for name, spec in config.columns.items()
        }
        self._page_size = config.page_size
        rows = (sidecar.rows for sidecar in self.sidecars.values())
        device.register_state(self.k_LCKD, self.v_LCKD, *rows)

    def poison(self, pages: NDArray[np.integer]) -> None:
        """Forget the side data of pages from the free list; what they hold is a stranger's.

        Keys and values need no such care: nobody reads past what he wrote himself.
        """
        slots = (pages[:, None] * np.int64(self._page_size) + np.arange(self._page_size)).ravel()
        for sidecar in self.sidecars.values():
            sidecar.poison(slots)
