"""The mixture-of-experts layer.

Owns the router and the experts' fused weights.

Shape legend: T tokens, K experts per token, E experts, M model dim, I expert inner dim.
"""

from torch import Tensor, nn

from dovetail.attention.backend import ForwardContext
from dovetail.config.model import MoeConfig
from dovetail.layers.linear import ReplicatedLinear
from dovetail.layers.shard import Placement, Shard


class SparseMoe(nn.Module):
    """Each token goes through its top-k experts. Router as in Qwen3-MoE (arXiv 2505.09388).

    ``moe_layer`` is the layer's number among those with experts.
    """

    def __init__(self, moe: MoeConfig, hidden_size: int, *, moe_layer: int, at: Placement) -> None:
        super().__init__()
        self.moe_layer = moe_layer
        self.top_k = moe.num_experts_per_tok
        self.norm_topk_prob = moe.norm_topk_prob
        self.gate = ReplicatedLinear(hidden_size, moe.num_experts, at=at)
        self.experts = Experts(moe, hidden_size, at=at)
        self._kernels = at.kernels

    def forward(self, ctx: ForwardContext, x_TM: Tensor) -> Tensor:
        """[T, M] -> [T, M]."""
        recorder = ctx.recorder
        weights_TK, ids_TK = self._kernels.route(
            self.gate(x_TM),
            self.top_k,
            self.norm_topk_prob,
            capture=None if recorder is None else recorder.direct(self.moe_layer),
        )
        if recorder is not None:
            recorder.record(self.moe_layer, ids_TK, weights_TK)
        return self.experts(x_TM, ids_TK, weights_TK)


class Experts(nn.Module):
    """The MLPs of all experts; each rank has a share of the inner dimension of every one."""

    def __init__(self, moe: MoeConfig, hidden_size: int, *, at: Placement) -> None:
        super().__init__()
        num_experts, inner = moe.num_experts, moe.intermediate_size
        self.shards = {
            "w_gate_up": Shard(dim=1, parts=(inner, inner)),
            "w_down": Shard(dim=2, parts=(inner,)),
        }
        self.w_gate_up = at.parameter(
            (num_experts, 2 * inner, hidden_size), self.shards["w_gate_up"]
        )
        self.w_down = at.parameter((num_experts, hidden_size, inner), self.shards["w_down"])
        self._comm = at.comm
        self._kernels = at.kernels

    def forward(self, x_TM: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts, [T, M]."""
        y_TM = self._kernels.fused_moe(x_TM, ids_TK, weights_TK, self.w_gate_up, self.w_down)
        return self._comm.all_reduce(y_TM)
