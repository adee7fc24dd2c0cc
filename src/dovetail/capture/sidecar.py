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
        rows: [C + 1, ...], any memory; all of it is poisoned. The last row is the sink, where
            padding is written; nobody reads it.
    """

    def __init__(self, spec: ColumnSpec, rows: Tensor) -> None:
        self.spec = spec
        self.rows = rows
        poison_all(rows, spec)

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


def row_dtype(spec: ColumnSpec) -> torch.dtype:
    """Return the dtype of a column's elements as torch has it."""
    return torch.from_numpy(np.empty(0, dtype=spec.dtype)).dtype


def poison_all(rows: Tensor, spec: ColumnSpec) -> None:
    """Fill memory for rows with poison; in bytes, since torch fills few kinds of integers."""
    poison = np.full(max(1, spec.row_bytes // spec.dtype.itemsize), spec.poison, dtype=spec.dtype)
    bytes_of_row = torch.from_numpy(poison.view(np.uint8)).to(rows.device)
    rows.view(len(rows), -1).view(torch.uint8).copy_(bytes_of_row)
