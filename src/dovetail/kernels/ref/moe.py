"""Routing to experts, and the experts' MLPs, in plain torch.

Shape legend: T tokens, E experts, K experts per token, M model dim, I expert inner dim,
S slots (T * K: one for each token and chosen expert).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.kernels.backend import Capture
from dovetail.kernels.ref.activation import silu_mul

GROUPED_MM_ROW_BYTES = 16
"""``torch.nn.functional.grouped_mm`` takes rows of a multiple of this."""


def router_topk(logits_TE: Tensor, k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """See ``kernels.api.router_topk``."""
    probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    # Not torch.topk: that leaves open which of several equal experts it takes.
    probs_TE, ids_TE = torch.sort(probs_TE, dim=-1, descending=True, stable=True)
    weights_TK, ids_TK = probs_TE[:, :k], ids_TE[:, :k]
    if norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK, ids_TK


def record_experts(ids_TK: Tensor, capture: Capture) -> None:
    """Store the ids at the tokens' cache slots."""
    routes_CLK, kv_slots_T, moe_layer = capture
    if routes_CLK.dtype == torch.uint16:  # torch cannot index it; the bits are the same
        routes_CLK = routes_CLK.view(torch.int16)
    routes_CLK[kv_slots_T.long(), moe_layer] = ids_TK.to(routes_CLK.dtype)


def fused_moe(
    x_TM: Tensor, ids_TK: Tensor, weights_TK: Tensor, w_gate_up_E2IM: Tensor, w_down_EMI: Tensor
) -> Tensor:
    """See ``kernels.api.fused_moe``."""
    num_tokens, k = ids_TK.shape
    if num_tokens == 1:
        y_SM = _of_one_token(x_TM[0], ids_TK[0].tolist(), w_gate_up_E2IM, w_down_EMI)
    else:
        y_SM = _by_expert(x_TM, ids_TK, w_gate_up_E2IM, w_down_EMI)
    y_TKM = y_SM.view(num_tokens, k, -1).float()
    return torch.bmm(weights_TK.unsqueeze(1), y_TKM).squeeze(1).to(x_TM.dtype)


def _of_one_token(
    x_M: Tensor, experts: list[int], w_gate_up_E2IM: Tensor, w_down_EMI: Tensor
) -> Tensor:
    """Go through the experts one by one: they are all different, so none share a matmul."""
    hidden_S2I = x_M.new_empty(len(experts), w_gate_up_E2IM.shape[1])
    for expert, hidden_2I in zip(experts, hidden_S2I, strict=True):
        torch.mv(w_gate_up_E2IM[expert], x_M, out=hidden_2I)
    y_SM = x_M.new_empty(len(experts), len(x_M))
    for expert, hidden_I, y_M in zip(experts, silu_mul(hidden_S2I), y_SM, strict=True):
        torch.mv(w_down_EMI[expert], hidden_I, out=y_M)
    return y_SM


def _by_expert(x_TM: Tensor, ids_TK: Tensor, w_gate_up_E2IM: Tensor, w_down_EMI: Tensor) -> Tensor:
    """Sort the slots by expert, so that the slots of an expert are the rows of one matmul."""
    k = ids_TK.shape[1]
    ids_S = ids_TK.flatten()
    order_S = ids_S.argsort(stable=True)
    sorted_x_SM = x_TM.index_select(0, order_S // k)
    ends_E = torch.bincount(ids_S, minlength=len(w_down_EMI)).cumsum(0).to(torch.int32)
    hidden_S2I = _grouped_linear(sorted_x_SM, w_gate_up_E2IM, ends_E)
    sorted_y_SM = _grouped_linear(silu_mul(hidden_S2I), w_down_EMI, ends_E)
    return torch.empty_like(sorted_y_SM).index_copy_(0, order_S, sorted_y_SM)


def _grouped_linear(x_SN: Tensor, weight_EON: Tensor, ends_E: Tensor) -> Tensor:
    """Apply to each run of rows, up to ``ends_E[e]``, the linear map of expert e."""
    widths = (x_SN.shape[1], weight_EON.shape[1])
    if all(width * x_SN.element_size() % GROUPED_MM_ROW_BYTES == 0 for width in widths):
        return F.grouped_mm(x_SN, weight_EON.transpose(1, 2), offs=ends_E)
    starts = [0, *ends_E.tolist()]
    runs = zip(starts, starts[1:], weight_EON, strict=False)
    return torch.cat([F.linear(x_SN[start:end], weight) for start, end, weight in runs])
