"""The experts' MLPs through torch's own grouped matrix product; sort and sum are ours.

Rows of M and I must be multiples of 16 bytes. In bfloat16, on GPUs of compute capability 9 and 10,
nothing waits for the sizes of groups, so a CUDA graph can hold it; elsewhere PyTorch reads them
back and multiplies group by group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.kernels.triton.activation import silu_mul
from dovetail.kernels.triton.experts import combine, sort_slots
from dovetail.kernels.triton.tiles import RowTiles, TileTable


def torch_grouped_moe(
    x_TM: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w_gate_up_E2IM: Tensor,
    w_down_EMI: Tensor,
    *,
    tiles: RowTiles,
) -> Tensor:
    """See ``kernels.backend.Kernels.fused_moe``."""
    order_S, _, counts_E = sort_slots(ids_TK, len(w_down_EMI), rows=1)
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    x_SM = x_TM.index_select(0, order_S // ids_TK.shape[1])
    hidden_S2I = F.grouped_mm(x_SM, w_gate_up_E2IM.transpose(1, 2), offs=ends_E)
    hidden_SI = silu_mul(hidden_S2I, tiles=tiles)
    sorted_y_SM = F.grouped_mm(hidden_SI, w_down_EMI.transpose(1, 2), offs=ends_E)
    y_SM = torch.empty_like(sorted_y_SM).index_copy_(0, order_S.long(), sorted_y_SM)
    return combine(y_SM, weights_TK)


class TorchExperts:
    """``Kernels.fused_moe`` by ``torch.nn.functional.grouped_mm``."""

    def __init__(self, table: TileTable) -> None:
        self._table = table

    def __call__(
        self,
        x_TM: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        w_gate_up_E2IM: Tensor,
        w_down_EMI: Tensor,
    ) -> Tensor:
        """See ``kernels.backend.Kernels.fused_moe``."""
        tiles = self._table.row(w_down_EMI.shape[2])
        return torch_grouped_moe(x_TM, ids_TK, weights_TK, w_gate_up_E2IM, w_down_EMI, tiles=tiles)
