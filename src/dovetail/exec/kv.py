"""The device memory behind page ids: keys, values, and per-token sidecars.

Owns the pools of the ``paged`` group. A cache slot is ``page * page_size + offset``;
every tensor here is indexed by it, so whatever happens to a page happens to all of
its columns. Changed on the compute lane only.

Shape legend: L layers, C cache slots, K KV heads, D head dim.
"""

import torch

from dovetail.config.schema import EngineConfig
from dovetail.exec.device import Device

TOKEN_POISON = -1


class KVStore:
    """KV and sidecars by cache slot.

    Attributes:
        k_LCKD, v_LCKD: the pools, in the model's dtype.
        sidecars: name -> [C, ...]; ``tokens`` (int32, the input token at each cached
            position) always exists.
    """

    def __init__(self, config: EngineConfig, device: Device) -> None:
        model = config.model
        num_slots = config.num_pages * config.page_size
        shape = (model.num_layers, num_slots, model.num_kv_heads, model.head_dim)
        dtype = getattr(torch, config.dtype)
        self.k_LCKD = torch.zeros(shape, dtype=dtype, device=device.torch_device)
        self.v_LCKD = torch.zeros(shape, dtype=dtype, device=device.torch_device)
        self.sidecars = {
            "tokens": torch.full(
                (num_slots,), TOKEN_POISON, dtype=torch.int32, device=device.torch_device
            )
        }
        device.register_state(self.k_LCKD, self.v_LCKD, *self.sidecars.values())
