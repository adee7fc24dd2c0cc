"""What the host knows of the tenants of slots: who lives there, and how it samples.

Owns a copy of what plans have told the device, so that nothing of it need be read back. Plans are
submitted in the order in which the device runs them, so the copy is that of the step at hand.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike

from dovetail.config.schema import EngineConfig
from dovetail.errors import InvariantError
from dovetail.exec.cuda.shaped import CUTTING, Shaping, is_cut
from dovetail.sampling.state import SLOT_COLUMNS, SamplingState
from dovetail.sched.plan import LogprobKindId, StepPlan


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

    def shaping(self, plan: StepPlan) -> Shaping | None:
        """Return what shapes the draws of a plan; None if its rows draw plainly, and no more."""
        slots = plan.rows.slot[plan.rows.samples > 0]
        of = {name: column[slots] for name, column in self.params.columns.items()}
        shaping = Shaping(
            penalises=bool(
                (
                    (of["repetition_penalty"] != 1.0)
                    | (of["frequency_penalty"] != 0.0)
                    | (of["presence_penalty"] != 0.0)
                ).any()
            ),
            biases=bool(of["num_biases"].any()),
            num_cut=int(np.count_nonzero(is_cut(**{name: of[name] for name in CUTTING}))),
            has_raw=bool((of["logprob_kind"] == LogprobKindId.RAW).any()),
        )
        reports = any(not score.is_prompt for score in plan.scores)
        return None if shaping == Shaping() and not reports else shaping
