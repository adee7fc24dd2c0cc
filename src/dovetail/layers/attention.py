"""The attention layer: projections around the step's attention.

Owns the parameters. How they are applied to q and k, where keys and values are stored, and who
attends to whom, is the business of the step's ``StepAttention``, which also applies the softmax
scale ``head_dim ** -0.5``.

Shape legend: T tokens, M model dim.
"""

from torch import Tensor, nn

from dovetail.attention.backend import ForwardContext, QkNorm, Rotation
from dovetail.config.model import ModelConfig
from dovetail.layers.basic import RmsNorm
from dovetail.layers.linear import ColumnLinear, RowLinear
from dovetail.layers.shard import Placement, divide


class Attention(nn.Module):
    """Grouped-query attention; each rank has an equal share of the heads."""

    def __init__(self, config: ModelConfig, layer_idx: int, *, at: Placement) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self.layer_idx = layer_idx
        self.head_dim = dim
        self.num_heads = divide(config.num_heads, at.comm.size, "num_heads")
        self.num_kv_heads = divide(config.num_kv_heads, at.comm.size, "num_kv_heads")
        self.qkv_proj = ColumnLinear(size, (q_size, kv_size, kv_size), bias=config.qkv_bias, at=at)
        self.o_proj = RowLinear(q_size, size, bias=config.o_bias, at=at)
        self.q_norm = RmsNorm(dim, config.rms_norm_eps, at=at) if config.qk_norm else None
        self.k_norm = RmsNorm(dim, config.rms_norm_eps, at=at) if config.qk_norm else None

    def forward(self, ctx: ForwardContext, rotation: Rotation, x_TM: Tensor) -> Tensor:
        """[T, M] -> [T, M]."""
        qk_norm = None
        if self.q_norm and self.k_norm:
            qk_norm = QkNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        out_THD = ctx.attention.attend(self.layer_idx, self.qkv_proj(x_TM), qk_norm, rotation)
        return self.o_proj(out_THD.flatten(1))
