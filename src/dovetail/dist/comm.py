"""The ranks that share a layer. Layers take a ``Comm`` and never ask where they run."""

from typing import Protocol

from torch import Tensor


class Comm(Protocol):
    """One axis of ranks.

    Attributes:
        rank: this process's index on the axis.
        size: number of ranks on the axis.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks."""
        ...

    def all_gather(self, x: Tensor, *, dim: int) -> Tensor:
        """Return the ranks' ``x`` concatenated along ``dim``."""
        ...


class LocalComm:
    """The axis of a single rank: every operation is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def all_gather(self, x: Tensor, *, dim: int) -> Tensor:
        """Return ``x``."""
        return x
