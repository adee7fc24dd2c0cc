"""A column of per-token rows, kept by cache slot like keys and values.

Owns the memory of one column and its poison: what nobody has written is no legal value, so it can
never pass for one. Must not know pages, steps or what a row means. Changed on the compute lane
only.

Shape legend: C cache slots, T tokens, S slots of some tokens.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.config.capture import ColumnSpec
from dovetail.kernels import api


class Sidecar:
    """One column: a row for each cache slot, and one more, the sink.

    Attributes:
        spec: dtype, shape and poison of a row.
        rows: [C + 1, ...]. The last row is the sink, where padding is written; nobody reads it.
    """

    def __init__(self, spec: ColumnSpec, num_slots: int, *, device: torch.device) -> None:
        self.spec = spec
        self.rows = filled(spec, num_slots + 1, device=device)

    @property
    def sink(self) -> int:
        """The slot of tokens that are none."""
        return len(self.rows) - 1

    def poison(self, slots_S: NDArray[np.int64]) -> None:
        """Forget the rows of these slots."""
        api.fill_rows(self.rows, slots_S, self.spec.poison)

    def write(self, slots_T: NDArray[np.int64], rows_T: Tensor) -> None:
        """Write the rows of a forward's tokens, padding included, at their slots."""
        api.scatter_rows(self.rows, slots_T, rows_T)

    def read(self, slots_S: NDArray[np.int64], out: NDArray[np.generic]) -> None:
        """Copy the rows of these slots into step-owned memory."""
        api.gather_rows(self.rows, slots_S, out)


def filled(spec: ColumnSpec, num_rows: int, *, device: torch.device) -> Tensor:
    """Return poisoned memory for rows."""
    array = np.full((num_rows, *spec.shape), spec.poison, dtype=spec.dtype)
    return torch.from_numpy(array).to(device)
