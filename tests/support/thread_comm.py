"""Ranks as threads of one process."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Axis:
    def __init__(self, size: int) -> None:
        self.size = size
        self.shared: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)


class ThreadComm:
    """One rank of an axis whose ranks are threads that make the same calls in the same order."""

    def __init__(self, axis: _Axis, rank: int) -> None:
        self.rank = rank
        self.size = axis.size
        self._axis = axis

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Tensor, *, dim: int) -> Tensor:
        """Return the ranks' tensors side by side."""
        return torch.cat(self._exchange(x), dim)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._axis.shared[self.rank] = x
        self._axis.barrier.wait()
        everyone = list(self._axis.shared)
        self._axis.barrier.wait()
        return everyone


def run_ranks(size: int, run: Callable[[ThreadComm], Any]) -> list[Any]:
    """Return what ``run`` returns on each rank; raises what a rank raises."""
    axis = _Axis(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = run(ThreadComm(axis, rank))
        except BaseException as error:
            errors.append(error)
            axis.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
