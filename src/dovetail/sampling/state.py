"""How each slot samples: one column a parameter, one row a slot, on the device.

Owns the columns and the token tables. A slot's row moves as a whole, so no parameter
can slip to another sequence. Changed on the compute lane only.

On the CPU the columns are read and written through numpy views: a step touches a
dozen of them, and a torch call costs several times a numpy call.

Shape legend: N rows that sample, B biases of these rows, J asked ids.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.sched.plan import MAX_BIASES, MAX_REPORTED_IDS, TokenTable


@dataclass(frozen=True, slots=True)
class SlotColumn:
    """One parameter: its dtype here and in a plan."""

    dtype: torch.dtype
    wire_dtype: type[np.generic]


SLOT_COLUMNS = {
    "temperature": SlotColumn(torch.float32, np.float32),
    "top_k": SlotColumn(torch.int64, np.int32),
    "top_p": SlotColumn(torch.float32, np.float32),
    "min_p": SlotColumn(torch.float32, np.float32),
    "seed": SlotColumn(torch.int64, np.int64),
    "sample_index": SlotColumn(torch.int64, np.int32),
    "repetition_penalty": SlotColumn(torch.float32, np.float32),
    "frequency_penalty": SlotColumn(torch.float32, np.float32),
    "presence_penalty": SlotColumn(torch.float32, np.float32),
    "logprob_kind": SlotColumn(torch.int64, np.int32),
    "prompt_len": SlotColumn(torch.int64, np.int32),
    "num_biases": SlotColumn(torch.int64, np.int32),
}


@dataclass(frozen=True, slots=True)
class Biases:
    """What is added to which logits.

    Attributes:
        row_B: int64, index among the rows that sample.
        token_B: int64.
        value_B: float32; -inf forbids the token.
    """

    row_B: Tensor
    token_B: Tensor
    value_B: Tensor


class SamplingState:
    """Sampling parameters and token tables by slot.

    Attributes:
        columns: name -> numpy view [slots]; the names are those of ``SLOT_COLUMNS``.
        tensors: all tensors, for declaring them as engine state.
    """

    def __init__(self, num_slots: int, *, device: torch.device) -> None:
        columns = {
            name: torch.zeros(num_slots, dtype=column.dtype, device=device)
            for name, column in SLOT_COLUMNS.items()
        }
        bias_ids = torch.zeros((num_slots, MAX_BIASES), dtype=torch.int32, device=device)
        bias_values = torch.zeros((num_slots, MAX_BIASES), dtype=torch.float32, device=device)
        bias_until = torch.zeros((num_slots, MAX_BIASES), dtype=torch.int32, device=device)
        report_ids = torch.zeros((num_slots, MAX_REPORTED_IDS), dtype=torch.int32, device=device)
        self.tensors = (*columns.values(), bias_ids, bias_values, bias_until, report_ids)
        self.columns = {name: tensor.numpy() for name, tensor in columns.items()}
        self._bias_ids = bias_ids.numpy()
        self._bias_values = bias_values.numpy()
        self._bias_until = bias_until.numpy()
        self._report_ids = report_ids.numpy()

    def write_slots(
        self, slots_N: NDArray[np.int32], values: dict[str, NDArray[np.generic]]
    ) -> None:
        """Set the parameters of new tenants, one [N] array a column."""
        for name, column in self.columns.items():
            column[slots_N] = values[name]

    def write_tokens(
        self,
        *,
        table: NDArray[np.int32],
        slot: NDArray[np.int32],
        index: NDArray[np.int32],
        token_id: NDArray[np.int32],
        value: NDArray[np.float32],
        until: NDArray[np.int32],
    ) -> None:
        """Set entries of the token tables; see ``sched.plan.TokenWrites``."""
        bias = table == TokenTable.BIAS
        self._bias_ids[slot[bias], index[bias]] = token_id[bias]
        self._bias_values[slot[bias], index[bias]] = value[bias]
        self._bias_until[slot[bias], index[bias]] = until[bias]
        self._report_ids[slot[~bias], index[~bias]] = token_id[~bias]

    def gather(self, slots_N: NDArray[np.int64]) -> dict[str, NDArray[np.generic]]:
        """Return each column's values for these slots, [N]."""
        return {name: column[slots_N] for name, column in self.columns.items()}

    def biases(self, slots_N: NDArray[np.int64], positions_N: NDArray[np.int64]) -> Biases | None:
        """Return the biases that hold for draws at these positions, or None if there are none."""
        counts = self.columns["num_biases"][slots_N]
        if not counts.any():
            return None
        width = int(counts.max())
        until = self._bias_until[slots_N, :width]
        holds = (np.arange(width) < counts[:, None]) & (positions_N[:, None] < until)
        rows, entries = np.nonzero(holds)
        if not len(rows):
            return None
        return Biases(
            row_B=torch.from_numpy(rows),
            token_B=torch.from_numpy(self._bias_ids[slots_N[rows], entries].astype(np.int64)),
            value_B=torch.from_numpy(self._bias_values[slots_N[rows], entries]),
        )

    def report_ids(self, slot: int, num_ids: int) -> Tensor:
        """Return the ids whose logprobs the slot's request asks for, int64 [J]."""
        return torch.from_numpy(self._report_ids[slot, :num_ids].astype(np.int64))
