"""How parameters are cut into the shares of the ranks.

Owns the rule a parameter declares and the arithmetic of cutting. Whoever loads or moves weights
reads the rules and needs to know no layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dovetail.dist.comm import Comm
from dovetail.errors import ConfigError
from dovetail.kernels.backend import LayerKernels


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard rule of one parameter.

    Along ``dim`` the whole parameter is a row of parts (q, k, v; gate, up), and each rank holds an
    equal, consecutive share of *every* part. ``dim`` None: each rank holds all of it.

    Attributes:
        dim: the dimension that is cut.
        parts: sizes of the parts in the whole parameter; their sum is its size along ``dim``.
    """

    dim: int | None = None
    parts: tuple[int, ...] = ()

    def whole_shape(self, local_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        if self.dim is None:
            return local_shape
        return (*local_shape[: self.dim], sum(self.parts), *local_shape[self.dim + 1 :])

    def take(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return a rank's share of the whole parameter."""
        if self.dim is None or size == 1:
            return whole
        shares = [part.chunk(size, self.dim)[rank] for part in whole.split(self.parts, self.dim)]
        return shares[0] if len(shares) == 1 else torch.cat(shares, self.dim)


REPLICATED = Shard()


def divide(total: int, size: int, name: str) -> int:
    """Return ``total / size``, each rank's share.

    Raises:
        ConfigError: it is no integer; ``name`` says what was to be divided.
    """
    if total % size:
        raise ConfigError(
            name, f"{total} cannot be divided over {size} ranks; choose a number that divides it"
        )
    return total // size


Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""From shape and dtype to memory for a parameter, which holds anything."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's parameters are, and who computes with them.

    Attributes:
        dtype: element type of parameters and activations.
        device: of the parameters, and of what follows from the configuration alone.
        allocate: where the parameters' memory comes from, on ``device``.
        comm: the ranks that share them.
        kernels: the operations of the layers.
    """

    dtype: torch.dtype
    device: torch.device
    allocate: Allocate
    comm: Comm
    kernels: LayerKernels

    def parameter(self, whole_shape: tuple[int, ...], shard: Shard = REPLICATED) -> nn.Parameter:
        """Return this rank's share of a parameter, uninitialised."""
        shape = list(whole_shape)
        if shard.dim is not None:
            name = f"parameter {shape}"
            shape[shard.dim] = sum(divide(part, self.comm.size, name) for part in shard.parts)
        return nn.Parameter(self.allocate(shape, self.dtype), requires_grad=False)


@runtime_checkable
class Sharded(Protocol):
    """A module that declares the shard rule of each parameter of its own."""

    shards: Mapping[str, Shard]


def named_shards(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Shard]]:
    """Yield each parameter once, with its full name and shard rule."""
    rules = {
        f"{prefix}.{name}": shard
        for prefix, module in model.named_modules()
        if isinstance(module, Sharded)
        for name, shard in module.shards.items()
    }
    for name, parameter in model.named_parameters():
        yield name, parameter, rules[name]
