"""Rows of per-token side data, in numpy: a step touches few bytes, less than a call costs.

Shape legend: C rows, S chosen rows, T tokens, L MoE layers, K experts of a token.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def fill_rows(rows_C: Tensor, index: NDArray[np.int64] | slice, value: float) -> None:
    """See ``kernels.api.fill_rows``."""
    rows_C.numpy()[index] = value


def store_layer(rows_TLK: Tensor, layer: int, values_TK: Tensor) -> None:
    """See ``kernels.api.store_layer``."""
    rows_TLK.numpy()[: len(values_TK), layer] = values_TK.numpy()


def scatter_rows(rows_C: Tensor, slots_T: NDArray[np.int64], values_T: Tensor) -> None:
    """See ``kernels.api.scatter_rows``."""
    rows_C.numpy()[slots_T] = values_T.numpy()


def gather_rows(rows_C: Tensor, slots_S: NDArray[np.int64], out_S: NDArray[np.generic]) -> None:
    """See ``kernels.api.gather_rows``."""
    out_S[...] = rows_C.numpy()[slots_S]
