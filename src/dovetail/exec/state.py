"""What the device knows of each slot between steps.

Owns lengths, last tokens, page tables and sampling columns. The host has no copy of
a decode row's length or token: they live here, so the next step can be planned
before the last one has come back. Changed on the compute lane only.
"""

import torch

from dovetail.config.schema import EngineConfig
from dovetail.exec.device import Device
from dovetail.sampling.state import SamplingState


class DeviceState:
    """State by slot.

    Attributes:
        generation: int32 [slots], the tenancy the row belongs to.
        kv_len: int64 [slots], cached tokens: the position of the next input token.
        last_token: int64 [slots], the token sampled last, -1 before the first.
        page_table: int64 [slots, pages].
        sampling: see ``SamplingState``.

    The arrays are numpy views of the tensors of the same name with ``_tensor``.
    """

    def __init__(self, config: EngineConfig, device: Device) -> None:
        slots, where = config.max_running, device.torch_device
        self.generation_tensor = torch.zeros(slots, dtype=torch.int32, device=where)
        self.kv_len_tensor = torch.zeros(slots, dtype=torch.int64, device=where)
        self.last_token_tensor = torch.full((slots,), -1, dtype=torch.int64, device=where)
        self.page_table_tensor = torch.full(
            (slots, config.max_pages_per_sequence), -1, dtype=torch.int64, device=where
        )
        self.generation = self.generation_tensor.numpy()
        self.kv_len = self.kv_len_tensor.numpy()
        self.last_token = self.last_token_tensor.numpy()
        self.page_table = self.page_table_tensor.numpy()
        self.sampling = SamplingState(slots, device=where)
        device.register_state(
            self.generation_tensor,
            self.kv_len_tensor,
            self.last_token_tensor,
            self.page_table_tensor,
            *self.sampling.tensors,
        )
