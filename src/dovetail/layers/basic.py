"""Norms, embeddings, the output head, and the dense MLP.

Shape legend: T tokens, N rows, M model dim, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.attention.backend import ForwardContext
from dovetail.layers.linear import ColumnLinear, RowLinear
from dovetail.layers.shard import REPLICATED, Placement, Shard


class RmsNorm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, size: int, eps: float, *, at: Placement) -> None:
        super().__init__()
        self.shards = {"weight": REPLICATED}
        self.weight = at.parameter((size,))
        self.eps = eps
        self._kernels = at.kernels

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised sum, and the sum; ``x`` None stands for zero."""
        if x is None:
            return self(residual), residual
        return self._kernels.add_rms_norm(x, residual, self.weight, self.eps)


class Embedding(nn.Module):
    """Token embeddings, cut by vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, *, at: Placement) -> None:
        super().__init__()
        self.shards = {"weight": Shard(dim=0, parts=(vocab_size,))}
        self.weight = at.parameter((vocab_size, hidden_size), self.shards["weight"])
        self._comm = at.comm

    def forward(self, token_ids_T: Tensor) -> Tensor:
        """[T] -> [T, M]."""
        if self._comm.size == 1:
            return F.embedding(token_ids_T, self.weight)
        num_rows = self.weight.shape[0]
        local_T = token_ids_T - self._comm.rank * num_rows
        elsewhere_T = (local_T < 0) | (local_T >= num_rows)
        rows_TM = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self._comm.all_reduce(rows_TM.masked_fill(elsewhere_T.unsqueeze(-1), 0))


class Head(nn.Module):
    """From hidden states to logits, cut by vocabulary.

    ``tied`` shares the weight of an ``Embedding``.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tied: Embedding | None, at: Placement
    ) -> None:
        super().__init__()
        self.shards = {"weight": Shard(dim=0, parts=(vocab_size,))}
        self.weight = (
            tied.weight if tied else at.parameter((vocab_size, hidden_size), self.shards["weight"])
        )
        self._comm = at.comm
        self._kernels = at.kernels

    def forward(self, hidden_NM: Tensor) -> Tensor:
        """[N, M] -> float32 [N, V], the same on every rank."""
        logits = self._kernels.linear(hidden_NM, self.weight)
        return self._comm.all_gather(logits, dim=-1).to(torch.float32)


class Mlp(nn.Module):
    """The dense SwiGLU MLP."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool, at: Placement
    ) -> None:
        super().__init__()
        self.gate_up_proj = ColumnLinear(
            hidden_size, (intermediate_size, intermediate_size), bias=bias, at=at
        )
        self.down_proj = RowLinear(intermediate_size, hidden_size, bias=bias, at=at)
        self._kernels = at.kernels

    def forward(self, ctx: ForwardContext, x_TM: Tensor) -> Tensor:
        """[T, M] -> [T, M]."""
        del ctx  # every token goes the same way
        return self.down_proj(self._kernels.silu_mul(self.gate_up_proj(x_TM)))
