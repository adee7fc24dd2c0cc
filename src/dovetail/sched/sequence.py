"""One running generation as the host knows it.

Owns the two clocks of a sequence: what has been *planned* (steps may be in
flight) and what has been *committed* (results are known). Must not know how
pages are found or how a forward is done.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from dovetail.cache.ledger import Holding
from dovetail.sched.stop import StopMatcher
from dovetail.wire.request import Request
from dovetail.wire.result import FinishReason, Usage


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # has no slot and no pages
    RUNNING = "running"  # may be planned
    RETRACTING = "retracting"  # loses its memory once nothing of it is in flight
    FINISHING = "finishing"  # its end is decided; a step or a read-out is still in flight
    FINISHED = "finished"  # has had its last event


@dataclass(slots=True)
class TokenRecord:
    """What is true of each generated token. Append-only: nothing here is ever rewritten.

    Attributes:
        token_ids: the ids.
        logprobs: in the forward that sampled them.
        epochs: weights epoch of that forward.
    """

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    epochs: list[int] = field(default_factory=list[int])

    def append(self, token_id: int, logprob: float, epoch: int) -> None:
        """Commit one token, all columns together."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return len(self.token_ids)


class Sequence:
    """One generation. Written by the ``Scheduler`` alone, on the loop thread.

    Invariants: ``computed_len <= planned_len``; once its prefill is planned,
    ``planned_len == known_len + pending_samples - 1``; a slot and a holding are
    there exactly in the states RUNNING, RETRACTING and FINISHING.

    Attributes:
        arrival: admission order number; lower is older and goes first.
        known_ids: prompt and committed output, the host's view of the tokens.
        slot, generation: row in device state, -1 while it has none.
        holding: its pages, or None.
        prefill_len: tokens that were known when it got its memory; they are forwarded
            from the host's copy, later ones from the device's.
        planned_len: positions whose forward has been planned.
        computed_len: positions whose forward has been committed.
        pending_samples: sampled tokens in flight.
        num_inflight: plans in flight that name this sequence.
        num_pages_sent: page-table entries the device has been told, a count per group.
    """

    __slots__ = (
        "arrival",
        "cached_len",
        "captured",
        "computed_len",
        "finish",
        "generation",
        "holding",
        "known_ids",
        "num_emitted",
        "num_inflight",
        "num_pages_sent",
        "num_retractions",
        "pending_samples",
        "planned_len",
        "prefill_len",
        "prompt_len",
        "readout_planned",
        "record",
        "request",
        "slot",
        "state",
        "stop_matcher",
    )

    def __init__(self, request: Request, *, arrival: int, stop_matcher: StopMatcher | None) -> None:
        self.request = request
        self.arrival = arrival
        self.prompt_len = len(request.prompt_token_ids)
        self.known_ids: list[int] = list(request.prompt_token_ids)
        self.record = TokenRecord()
        self.stop_matcher = stop_matcher
        self.state = SequenceState.WAITING
        self.finish: FinishReason | None = None
        self.captured: dict[str, NDArray[np.generic]] | None = None
        self.readout_planned = False
        self.cached_len = 0
        self.num_emitted = 0
        self.num_retractions = 0
        self.slot = -1
        self.generation = -1
        self.holding: Holding | None = None
        self.num_pages_sent: list[int] = []
        self.prefill_len = 0
        self.planned_len = 0
        self.computed_len = 0
        self.pending_samples = 0
        self.num_inflight = 0

    @property
    def known_len(self) -> int:
        """Tokens the host knows: prompt and committed output."""
        return len(self.known_ids)

    @property
    def is_prefilling(self) -> bool:
        """True while tokens that only the host knows are left to forward."""
        return self.planned_len < self.prefill_len

    @property
    def may_sample(self) -> bool:
        """True if one more sampled token stays within ``max_new_tokens``, whatever is in flight."""
        return len(self.record) + self.pending_samples < self.request.max_new_tokens

    @property
    def usage(self) -> Usage:
        """Token counts as committed."""
        return Usage(
            prompt_tokens=self.prompt_len,
            completion_tokens=len(self.record),
            cached_tokens=self.cached_len,
            num_retractions=self.num_retractions,
        )

    def append(self, token_id: int, logprob: float, epoch: int) -> None:
        """Commit one sampled token."""
        self.known_ids.append(token_id)
        self.record.append(token_id, logprob, epoch)

    def forget_memory(self) -> None:
        """Go back to the state before any forward; the record stays."""
        self.slot = self.generation = -1
        self.holding = None
        self.num_pages_sent = []
        self.planned_len = self.computed_len = 0
