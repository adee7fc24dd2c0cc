"""How each slot samples: one column a parameter, one row a slot, on the device.

Owns the columns. A row moves as a whole, so no parameter can slip to another
sequence. Changed on the compute lane only.
"""

import torch
from torch import Tensor

from dovetail.kernels import api

_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "sample_index": torch.int64,
}


class SamplingColumns:
    """Sampling parameters by slot.

    Attributes:
        columns: name -> [num_slots]; the names are those of ``kernels.api.sample``.
    """

    def __init__(self, num_slots: int, *, device: torch.device) -> None:
        self.columns = {
            name: torch.zeros(num_slots, dtype=dtype, device=device)
            for name, dtype in _DTYPES.items()
        }

    def write(self, slots_N: Tensor, values: dict[str, Tensor]) -> None:
        """Set the parameters of new tenants.

        Args:
            slots_N: int64.
            values: one [N] tensor a column; a seed is its 64-bit pattern as int64.
        """
        for name, column in self.columns.items():
            column[slots_N] = values[name].to(column.dtype)

    def sample(
        self, logits_NV: Tensor, *, slots_N: Tensor, position_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw one token for each of ``slots_N``; see ``kernels.api.sample``.

        Args:
            logits_NV: float32.
            slots_N: int64, whose parameters apply.
            position_N: int64, the index each drawn token will have in its sequence.
        """
        params = {f"{name}_N": column[slots_N] for name, column in self.columns.items()}
        return api.sample(logits_NV, position_N=position_N, **params)
