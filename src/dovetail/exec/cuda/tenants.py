"""What the host knows of the tenants of slots: who lives there, and how it samples.

Owns a copy of what plans have told the device, so that nothing of it need be read back. Plans are
submitted in the order in which the device runs them, so the copy is that of the step at hand.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike

from dovetail.config.schema import EngineConfig
from dovetail.errors import InvariantError
from dovetail.sampling.state import SLOT_COLUMNS, SamplingState
from dovetail.sched.plan import LogprobKindId, StepPlan

_NEUTRAL = (
    ("repetition_penalty", 1.0),
    ("frequency_penalty", 0.0),
    ("presence_penalty", 0.0),
    ("num_biases", 0),
    ("logprob_kind", int(LogprobKindId.SCALED)),
)


class Tenants:
    """The tenants of all slots. Submitting thread only.

    Attributes:
        params: how each slot samples.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.params = SamplingState(config.max_running, device=torch.device("cpu"))
        self._generation = np.zeros(config.max_running, dtype=np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Take note of a plan's new tenants."""
        writes, tokens = plan.slot_writes, plan.token_writes
        if len(writes):
            self._generation[writes.slot] = writes.generation
            values = {
                name: getattr(writes, name).view(column.wire_dtype)
                for name, column in SLOT_COLUMNS.items()
            }
            self.params.write_slots(writes.slot, values)
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
        is_stale = self._generation[np.asarray(slots)] != np.asarray(generations)
        if is_stale.any():
            stale = np.asarray(slots)[is_stale].tolist()
            raise InvariantError(f"a plan names stale slots {stale}")

    def draws_plainly(self, plan: StepPlan) -> bool:
        """True if nothing truncates, penalises or biases a draw, or asks for more than it."""
        if any(not score.is_prompt for score in plan.scores):
            return False
        columns, slots = self.params.columns, plan.rows.slot[plan.rows.samples > 0]
        is_cut = (
            (columns["top_k"][slots] > 0)
            | (columns["top_p"][slots] < 1.0)
            | (columns["min_p"][slots] > 0.0)
        )
        if (is_cut & (columns["temperature"][slots] != 0.0)).any():
            return False
        return all((columns[name][slots] == value).all() for name, value in _NEUTRAL)
