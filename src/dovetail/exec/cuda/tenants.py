"""What the host knows of the tenants of slots: who lives there, and how it samples.

Owns a copy of what plans have told the device, so that nothing of it need be read back. Plans are
submitted in the order in which the device runs them, so the copy is that of the step at hand.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from dovetail.config.schema import EngineConfig
from dovetail.errors import InvariantError
from dovetail.sampling.state import SLOT_COLUMNS, SamplingState
from dovetail.sched.plan import LogprobKindId, Rows, StepPlan


class Tenants:
    """The tenants of all slots. Submitting thread only.

    Attributes:
        params: how each slot samples.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.params = SamplingState(config.max_running, device=torch.device("cpu"))
        self._is_shaped = np.zeros(config.max_running, dtype=bool)
        self._generation = np.zeros(config.max_running, dtype=np.int32)
        self._seen: Rows | None = None  # rows of tenants that are all there still
        self._seen_shaped = False

    def apply(self, plan: StepPlan) -> None:
        """Take note of a plan's new tenants."""
        writes, tokens = plan.slot_writes, plan.token_writes
        if len(writes):
            self._seen = None
            self._generation[writes.slot] = writes.generation
            values = {
                name: getattr(writes, name).view(column.wire_dtype)
                for name, column in SLOT_COLUMNS.items()
            }
            self.params.write_slots(writes.slot, values)
            self._is_shaped[writes.slot] = _is_shaped(values)
        if len(tokens):
            self.params.write_tokens(
                table=tokens.table,
                slot=tokens.slot,
                index=tokens.index,
                token_id=tokens.token_id,
                value=tokens.value,
                until=tokens.until,
            )

    def check(self, slots: ArrayLike, generations: ArrayLike) -> None:
        """Raise InvariantError if a handle names a tenancy that its slot does not have."""
        named, given = np.asarray(slots), np.asarray(generations, dtype=np.int32)
        known = self._generation[named]
        if known.tobytes() != given.tobytes():  # as bytes: numpy's comparison is mostly overhead
            stale = named[known != given].tolist()
            raise InvariantError(f"a plan names stale slots {stale}")

    def are_shaped(self, rows: Rows) -> bool:
        """Check the handles of rows, and return whether something shapes their draws.

        Arrays of a plan are frozen, so the same rows again are looked at only after newcomers.

        Raises:
            InvariantError: see ``check``.
        """
        if rows is not self._seen:
            self.check(rows.slot, rows.generation)
            self._seen_shaped = bool(self._is_shaped[rows.slot[rows.samples > 0]].any())
            self._seen = rows
        return self._seen_shaped


def _is_shaped(of: dict[str, NDArray[np.generic]]) -> NDArray[np.bool_]:
    """Return whether tenants draw otherwise than plainly, by their sampling parameters."""
    is_cut = (of["top_k"] != 0) | (of["top_p"] != 1.0) | (of["min_p"] != 0.0)
    is_penalised = (
        (of["repetition_penalty"] != 1.0)
        | (of["frequency_penalty"] != 0.0)
        | (of["presence_penalty"] != 0.0)
    )
    reports_raw = of["logprob_kind"] == LogprobKindId.RAW
    return (
        (is_cut & (of["temperature"] != 0.0)) | is_penalised | (of["num_biases"] != 0) | reports_raw
    )
