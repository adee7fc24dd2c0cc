"""An executor without tensors, for the scheduler alone. Imports no torch.

Owns a script: which token a sequence gets at which position. It keeps the same
contract as the real executor and checks what a plan may not do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InvariantError
from dovetail.exec.pending import PendingStep
from dovetail.sched.plan import (
    FROM_DEVICE,
    ReadRows,
    RowStatus,
    Score,
    StepPlan,
    StepResult,
    TokenScores,
)

Script = Callable[[list[int]], int]
"""From all tokens of a sequence to the next one."""


@dataclass(slots=True)
class _Slot:
    generation: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    kv_len: int = 0
    pages: set[int] = field(default_factory=set[int])


class FakeExecutor:
    """Runs plans by a script.

    Args:
        script: see ``Script``.
        num_slots, page_size: ``max_running`` and ``page_size`` of the configuration.
        status: from all tokens of a sequence to the status of its next draw.
    """

    def __init__(
        self,
        script: Script,
        *,
        num_slots: int,
        page_size: int,
        status: Callable[[list[int]], RowStatus] = lambda token_ids: RowStatus.OK,
    ) -> None:
        self._script = script
        self._page_size = page_size
        self._status = status
        self._slots = [_Slot() for _ in range(num_slots)]

    def update(self, work: Callable[[], None]) -> None:
        """Run the work; a script has no weights."""
        work()

    def submit(self, plan: StepPlan) -> PendingStep:
        """Run the plan at once and keep its result until it is asked for."""
        for slot, generation in zip(
            plan.slot_writes.slot.tolist(), plan.slot_writes.generation.tolist(), strict=True
        ):
            self._slots[slot] = _Slot(generation)
        for _, slot, index, _, _ in plan.page_writes.columns.T.tolist():
            self._slots[slot].pages.add(index)
        readouts: tuple[dict[str, NDArray[np.generic]], ...] = tuple(
            {
                column: np.array(
                    self._tenant(readout.slot, readout.generation)[readout.start : readout.end],
                    dtype=np.int32,
                )
                for column in readout.columns
            }
            for readout in plan.readouts
        )
        drawn = self._forward(plan)
        result = StepResult(
            step_id=plan.step_id,
            token_ids=np.array([token for token, _ in drawn], dtype=np.int32)[:, None],
            counts=plan.rows.samples,
            logprobs=np.zeros((len(drawn), 1), dtype=np.float32),
            status=np.array([status for _, status in drawn], dtype=np.int32),
            scores=tuple(self._score(plan, score) for score in plan.scores),
        )
        read = ReadRows(step_id=plan.step_id, rows=readouts)
        return PendingStep(plan, lambda: result, lambda: read)

    def _score(self, plan: StepPlan, score: Score) -> TokenScores:
        """Any numbers of the right shape."""
        return TokenScores(
            logprobs=np.zeros(score.count if score.is_prompt else 0, dtype=np.float32),
            top_ids=np.zeros((score.count, score.num_top), dtype=np.int32),
            top_logprobs=np.zeros((score.count, score.num_top), dtype=np.float32),
            id_logprobs=np.zeros((score.count, score.num_ids), dtype=np.float32),
        )

    def close(self) -> None:
        """Nothing to let go of."""

    def _tenant(self, slot: int, generation: int) -> list[int]:
        if self._slots[slot].generation != generation:
            raise InvariantError(f"slot {slot} generation {generation} is stale")
        return self._slots[slot].token_ids

    def _forward(self, plan: StepPlan) -> list[tuple[int, RowStatus]]:
        rows, uploaded, drawn = plan.rows, plan.token_ids.tolist(), []
        for slot, generation, start, width, samples in zip(
            *(
                getattr(rows, name).tolist()
                for name in ("slot", "generation", "start", "width", "samples")
            ),
            strict=True,
        ):
            token_ids = self._tenant(slot, generation)
            state = self._slots[slot]
            if start == FROM_DEVICE:
                if state.kv_len != len(token_ids) - 1:
                    raise InvariantError(f"slot {slot} decodes without a sampled token")
            else:
                # A prefix hit starts behind tokens that were never uploaded to this slot.
                hole = [-1] * (start - len(token_ids))
                token_ids = token_ids[:start] + hole + uploaded[:width]
                del uploaded[:width]
                state.token_ids, state.kv_len = token_ids, start
            state.kv_len += width
            if (state.kv_len - 1) // self._page_size not in state.pages:
                raise InvariantError(f"slot {slot} writes past its pages")
            status = self._status(token_ids)
            token = self._script(token_ids) if samples else 0
            if samples:
                token_ids.append(token)
            drawn.append((token, status if samples else RowStatus.OK))
        return drawn
