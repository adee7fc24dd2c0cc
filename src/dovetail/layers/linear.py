"""Linear layers, cut over the ranks by output or by input.

Owns the weight, an optional bias, and the reduction that makes a cut layer whole again.

Shape legend: N input features, O output features.
"""

from torch import Tensor, nn

from dovetail.layers.shard import REPLICATED, Placement, Shard


class ReplicatedLinear(nn.Module):
    """A linear layer that every rank computes whole; no bias."""

    def __init__(self, in_features: int, out_features: int, *, at: Placement) -> None:
        super().__init__()
        self.shards = {"weight": REPLICATED}
        self.weight = at.parameter((out_features, in_features))
        self._kernels = at.kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., O]."""
        return self._kernels.linear(x, self.weight)


class ColumnLinear(nn.Module):
    """A linear layer cut by output: each rank returns its share of every part.

    ``parts`` are the sizes of the outputs that are fused into one matmul (q, k, v; gate, up).
    """

    def __init__(
        self, in_features: int, parts: tuple[int, ...], *, bias: bool, at: Placement
    ) -> None:
        super().__init__()
        shard = Shard(dim=0, parts=parts)
        self.shards = {"weight": shard} | ({"bias": shard} if bias else {})
        self.weight = at.parameter((sum(parts), in_features), shard)
        self.bias = at.parameter((sum(parts),), shard) if bias else None
        self._kernels = at.kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., O / ranks]."""
        return self._kernels.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer cut by input: ranks take their share of the input and sum their outputs."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, at: Placement) -> None:
        super().__init__()
        self.shards = {"weight": Shard(dim=1, parts=(in_features,))}
        self.weight = at.parameter((out_features, in_features), self.shards["weight"])
        self.bias = at.parameter((out_features,)) if bias else None
        if bias:
            self.shards["bias"] = REPLICATED
        self._kernels = at.kernels
        self._comm = at.comm

    def forward(self, x: Tensor) -> Tensor:
        """[..., N / ranks] -> [..., O], the same on every rank."""
        bias = self.bias if self._comm.rank == 0 else None  # the sum must hold it once
        return self._comm.all_reduce(self._kernels.linear(x, self.weight, bias))
