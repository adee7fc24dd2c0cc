"""One running generation as the host knows it.

Owns the two clocks of a sequence: what has been *planned* (steps may be in
flight) and what has been *committed* (results are known). Must not know how
pages are found or how a forward is done.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from dovetail.cache.ledger import Holding
from dovetail.config.capture import ColumnSpec
from dovetail.sched.captured import CapturedColumns
from dovetail.sched.plan import TokenScores
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


_LEAVING = (SequenceState.RETRACTING, SequenceState.FINISHING)
NO_LIMIT = 2**31 - 1


@dataclass(slots=True)
class TokenRecord:
    """What is true of each generated token. Append-only: nothing here is ever rewritten.

    Attributes:
        token_ids: the ids.
        logprobs: in the forward that sampled them.
        epochs: weights epoch of that forward.
        scores: other probabilities of that draw; None for a request that asks for none.
    """

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    epochs: list[int] = field(default_factory=list[int])
    scores: list[TokenScores | None] = field(default_factory=list[TokenScores | None])

    def append(self, token_id: int, logprob: float, epoch: int, scores: TokenScores | None) -> None:
        """Commit one token, all columns together."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.epochs.append(epoch)
        self.scores.append(scores)

    def __len__(self) -> int:
        return len(self.token_ids)


class Sequence:
    """One generation. Written by the ``Scheduler`` alone, on the loop thread.

    Invariants: ``computed_len <= planned_len``; once its prefill is planned,
    ``planned_len == known_len + pending_samples - 1``; a slot and a holding are
    there exactly in the states RUNNING, RETRACTING and FINISHING.

    Attributes:
        sample_index: which of the request's ``n`` generations this is.
        biases: (token id, number added to its logit, first position where it is not), its
            logit biases and the ids that ``min_new_tokens`` holds back.
        rank: place in line; lower is served first and retracted last.
        num_passes: how often another sequence was preferred by the policy.
        known_ids: prompt and committed output, the host's view of the tokens.
        end_ids: ids that end it.
        samples_left: tokens that may still be planned to be sampled: what is in flight counts.
        publish_at: ``computed_len`` at which another page is full and can be shared.
        slot, generation: row in device state, -1 while it has none.
        holding: its pages, or None.
        prefill_len: tokens that were known when it got its memory; they are forwarded
            from the host's copy, later ones from the device's.
        planned_len: positions whose forward has been planned.
        computed_len: positions whose forward has been committed.
        pending_samples: sampled tokens in flight.
        num_inflight: plans in flight that name this sequence.
        prompt_scores: probabilities of prompt tokens, in order; append-only.
        scored, planned_score: prompt position whose probability is the next to be
            committed, and planned.
        captured: the rows of the columns that its request asks for; None if it asks for none, and
            once a row turned out to be missing.
        read_at: ``computed_len`` at which rows are to be read while it runs.
        wants_scores: each draw reports more than the chosen token's logprob.
        num_pages_sent: page-table entries the device has been told, a count per group.
    """

    __slots__ = (
        "biases",
        "cached_len",
        "captured",
        "computed_len",
        "end_ids",
        "finish",
        "generation",
        "holding",
        "known_ids",
        "num_emitted",
        "num_inflight",
        "num_pages_sent",
        "num_passes",
        "num_retractions",
        "pending_samples",
        "planned_len",
        "planned_score",
        "prefill_len",
        "prompt_len",
        "prompt_scores",
        "publish_at",
        "rank",
        "read_at",
        "record",
        "request",
        "sample_index",
        "samples_left",
        "scored",
        "slot",
        "state",
        "stop_matcher",
        "wants_scores",
    )

    def __init__(
        self,
        request: Request,
        *,
        sample_index: int,
        rank: tuple[int, int],
        eos_token_ids: frozenset[int],
        stop_matcher: StopMatcher | None,
        columns: Mapping[str, ColumnSpec],
    ) -> None:
        self.request = request
        self.sample_index = sample_index
        self.rank = rank
        self.num_passes = 0
        self.prompt_len = len(request.prompt_token_ids)
        self.biases = _biases(request, eos_token_ids)
        self.end_ids = _end_ids(request, eos_token_ids)
        self.samples_left = request.max_new_tokens
        self.publish_at = NO_LIMIT
        logprobs = request.logprobs
        self.wants_scores = (
            logprobs.top_logprobs_num > 0
            or len(logprobs.token_ids_logprob) > 0
            or logprobs.sampling_mask
        )
        self.known_ids: list[int] = list(request.prompt_token_ids)
        self.record = TokenRecord()
        self.stop_matcher = stop_matcher
        self.state = SequenceState.WAITING
        self.finish: FinishReason | None = None
        self.captured: CapturedColumns | None = None
        if request.capture.columns:
            specs = {name: columns[name] for name in request.capture.columns}
            self.captured = CapturedColumns(specs, start=request.capture.start_len)
        self.read_at = NO_LIMIT
        self.cached_len = 0
        self.scored = self.planned_score = _first_score(request)
        self.prompt_scores: list[TokenScores] = []
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
    def usage(self) -> Usage:
        """Token counts as committed."""
        return Usage(
            prompt_tokens=self.prompt_len,
            completion_tokens=len(self.record),
            cached_tokens=self.cached_len,
            num_retractions=self.num_retractions,
        )

    @property
    def max_cached_len(self) -> int:
        """Most tokens a prefix hit may serve: the last known token has to be forwarded, and so
        has each token whose successor's probability is wanted.
        """
        last = self.known_len - 1
        return last if self.scored >= self.prompt_len else min(last, self.scored - 1)

    def score_targets(self, start: int, width: int) -> range:
        """Return the prompt positions to score when ``[start, start + width)`` is forwarded."""
        first = max(start + 1, self.planned_score)
        return range(first, max(first, min(start + width + 1, self.prompt_len)))

    def append(self, token_id: int, logprob: float, epoch: int, scores: TokenScores | None) -> None:
        """Commit one sampled token."""
        self.known_ids.append(token_id)
        self.record.append(token_id, logprob, epoch, scores)

    def append_prompt_scores(self, scores: TokenScores) -> None:
        """Commit the probabilities of the next prompt tokens."""
        self.prompt_scores.append(scores)
        self.scored += len(scores.logprobs)

    @property
    def needs_readout(self) -> bool:
        """True while captured columns are still to be read before the memory goes.

        Rows that are recorded already are read, too: whether they came out the same is told.
        """
        captured = self.captured
        return (
            captured is not None and self.state in _LEAVING and captured.planned < self.computed_len
        )

    def start(self, holding: Holding, epoch: int) -> None:
        """Begin to run on a slot and pages, the first of which may be computed already."""
        self.state = SequenceState.RUNNING
        self.holding = holding
        self.num_pages_sent = [0] * len(holding.tables)
        self.prefill_len = self.known_len
        self.planned_len = self.computed_len = holding.cached_len
        if self.num_retractions == 0:
            self.cached_len = holding.cached_len
        if self.captured is not None:
            self.captured.begin(holding.cached_len, epoch)
            self.read_at = self._next_read_at(self.captured)

    def read_until(self, end: int) -> None:
        """Note that a read-out is planned of all rows before ``end``."""
        assert self.captured is not None
        self.captured.planned = end
        self.read_at = self._next_read_at(self.captured)

    def _next_read_at(self, captured: CapturedColumns) -> int:
        interval = self.request.capture.interval
        return max(captured.recorded, captured.planned) + interval if interval else NO_LIMIT

    def begin_again(self) -> None:
        """Under new weights, forget the old ones' view of the prompt, unless a token came of it.

        Rows that an event has had stay.
        """
        if len(self.record):
            return
        self.scored = self.planned_score = _first_score(self.request)
        self.prompt_scores = []
        captured = self.captured
        if captured is not None and not captured.has_left:
            self.captured = CapturedColumns(captured.specs, start=captured.start)

    def forget_memory(self) -> None:
        """Go back to the state before any forward; the record stays."""
        self.slot = self.generation = -1
        self.holding = None
        self.num_pages_sent = []
        self.planned_len = self.computed_len = 0
        self.planned_score = self.scored
        if self.captured is not None:
            self.captured.forget_memory()


def _first_score(request: Request) -> int:
    start = request.logprobs.logprob_start_len
    # The token at position 0 has nothing before it, so it has no probability.
    return len(request.prompt_token_ids) if start < 0 else max(start, 1)


def _end_ids(request: Request, eos_token_ids: frozenset[int]) -> frozenset[int]:
    stop_token_ids = frozenset(request.sampling.stop_token_ids or ())
    return stop_token_ids if request.sampling.ignore_eos else stop_token_ids | eos_token_ids


def _biases(request: Request, eos_token_ids: frozenset[int]) -> list[tuple[int, float, int]]:
    sampling = request.sampling
    biases = [(token, value, NO_LIMIT) for token, value in (sampling.logit_bias or {}).items()]
    if sampling.min_new_tokens:
        until = len(request.prompt_token_ids) + sampling.min_new_tokens
        biases += [
            (token_id, -math.inf, until) for token_id in sorted(_end_ids(request, eos_token_ids))
        ]
    return biases
