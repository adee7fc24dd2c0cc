# pyright: strict
"""Which per-token columns an engine keeps beside its KV, and what a row of each takes.

Owns the list of columns: scheduler, memory and executor count by it. Must not know tensors.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dovetail.config.model import ModelConfig
from dovetail.errors import ConfigError
from dovetail.wire.capture import COLUMNS, expert_dtype

OPTIONAL_COLUMNS = COLUMNS[1:]
"""Columns that ``capture`` may name beside ``tokens``, which every engine has."""

MAX_EXPERTS = 2**16 - 1


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column.

    Attributes:
        dtype: of an element.
        shape: of a token's row.
        poison: what a row holds that nobody has written; never a legal value. NaN is one.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    poison: float

    @property
    def is_poison_all_ones(self) -> bool:
        """True if memory whose bits are all 1 is poison; of floats that is a NaN."""
        if self.dtype.kind == "f":
            return bool(np.isnan(self.poison))
        return set(np.array(self.poison, dtype=self.dtype).tobytes()) == {255}

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * math.prod(self.shape)


def column_specs(model: ModelConfig, capture: Iterable[str]) -> dict[str, ColumnSpec]:
    """Return the columns of an engine that captures these, ``tokens`` first."""
    specs = {"tokens": ColumnSpec(np.dtype(np.int32), (), -1)}
    for name in capture:
        assert model.moe is not None
        shape = (len(model.moe.layer_ids), model.moe.num_experts_per_tok)
        if name == "experts":
            dtype = expert_dtype(model.moe.num_experts)
            specs[name] = ColumnSpec(dtype, shape, np.iinfo(dtype).max)
        else:
            specs[name] = ColumnSpec(np.dtype(np.float32), shape, np.nan)
    return specs


def checked_capture(names: Iterable[str], model: ModelConfig) -> tuple[str, ...]:
    """Return the optional columns to keep, without repeats, in their fixed order.

    Raises:
        ConfigError: there is no such column, or the model has nothing to write into it.
    """
    asked = set(names) - {"tokens"}
    for name in sorted(asked):
        if name not in OPTIONAL_COLUMNS:
            known = ", ".join(OPTIONAL_COLUMNS)
            raise ConfigError("capture", f"{name!r} is no column; the columns are {known}")
        if model.moe is None or not model.moe.layer_ids:
            raise ConfigError(
                "capture",
                f"{model.architecture} is dense here, so it has no {name} to capture; leave out "
                "--capture (--enable-return-routed-experts)",
            )
        if model.moe.num_experts > MAX_EXPERTS:
            raise ConfigError(
                "capture", f"the model has {model.moe.num_experts} experts; at most {MAX_EXPERTS}"
            )
    return tuple(name for name in OPTIONAL_COLUMNS if name in asked)
