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
from dovetail.errors import InvariantError
from dovetail.sched.captured import CapturedColumns
from dovetail.sched.plan import Score, TokenScores
from dovetail.sched.progress import MOST_END_IDS, NEVER, Progress
from dovetail.sched.stop import StopMatcher
from dovetail.wire.request import Request
from dovetail.wire.result import FinishReason, Usage
from dovetail.wire.validate import MAX_MASK_IDS


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # has no slot and no pages
    RUNNING = "running"  # may be planned
    RETRACTING = "retracting"  # loses its memory once nothing of it is in flight
    FINISHING = "finishing"  # its end is decided; a step or a read-out is still in flight
    FINISHED = "finished"  # has had its last event


EARLY_ROWS = 32
"""Captured rows that are worth reading before their sequence ends."""

LATE_ROWS = 16
"""Rows that are left for the end where that is known: others may end in the same step, and what is
read then holds up the answers of all."""

_LEAVING = (SequenceState.RETRACTING, SequenceState.FINISHING)


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

    def extend(self, token_ids: list[int], logprobs: list[float], epochs: list[int]) -> None:
        """Commit tokens that have no scores."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.epochs += epochs
        self.scores += [None] * len(token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)


class Sequence:
    """One generation. Written by the ``Scheduler`` alone, on the loop thread.

    Its clocks are those of its slot (``Progress``), where a step moves them for all rows at once;
    its newest tokens come from there as soon as ``known_ids`` or ``record`` are looked at.

    Invariants: ``computed_len <= planned_len``; once its prefill is planned,
    ``planned_len == known_len - 1 +`` its sampled tokens in flight; a slot and a holding are
    there exactly in the states RUNNING, RETRACTING and FINISHING.

    Attributes:
        sample_index: which of the request's ``n`` generations this is.
        biases: (token id, number added to its logit, first position where it is not), its
            logit biases and the ids that ``min_new_tokens`` holds back.
        rank: place in line; lower is served first and retracted last.
        num_passes: how often another sequence was preferred by the policy.
        end_ids: ids that end it.
        end_len: ``computed_len`` at which it has all tokens that it may generate.
        slot, generation: row in device state, -1 while it has none.
        holding: its pages, or None.
        prefill_len: tokens that were known when it got its memory; they are forwarded
            from the host's copy, later ones from the device's.
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
        "_known_ids",
        "_progress",
        "_record",
        "biases",
        "cached_len",
        "captured",
        "end_ids",
        "end_len",
        "finish",
        "generation",
        "holding",
        "num_emitted",
        "num_pages_sent",
        "num_passes",
        "num_retractions",
        "planned_score",
        "prefill_len",
        "prompt_len",
        "prompt_scores",
        "rank",
        "read_at",
        "request",
        "sample_index",
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
        self.end_len = self.prompt_len + request.max_new_tokens - 1
        logprobs = request.logprobs
        self.wants_scores = (
            logprobs.top_logprobs_num > 0
            or len(logprobs.token_ids_logprob) > 0
            or logprobs.sampling_mask
        )
        self._known_ids: list[int] = list(request.prompt_token_ids)
        self._record = TokenRecord()
        self._progress: Progress | None = None
        self.stop_matcher = stop_matcher
        self.state = SequenceState.WAITING
        self.finish: FinishReason | None = None
        self.captured: CapturedColumns | None = None
        if request.capture.columns:
            specs = {name: columns[name] for name in request.capture.columns}
            start = request.capture.start_len
            max_rows = self.prompt_len + request.max_new_tokens - start
            self.captured = CapturedColumns(specs, start=start, max_rows=max_rows)
        self.read_at = NEVER
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

    @property
    def held(self) -> Holding:
        """Its pages, of which it has some."""
        assert self.holding is not None
        return self.holding

    # -- clocks --------------------------------------------------------------------------

    @property
    def planned_len(self) -> int:
        """Positions whose forward has been planned."""
        return 0 if self._progress is None else self._progress.planned_len.item(self.slot)

    @planned_len.setter
    def planned_len(self, length: int) -> None:
        assert self._progress is not None
        self._progress.planned_len[self.slot] = length

    @property
    def computed_len(self) -> int:
        """Positions whose forward has been committed."""
        return 0 if self._progress is None else self._progress.computed_len.item(self.slot)

    @computed_len.setter
    def computed_len(self, length: int) -> None:
        assert self._progress is not None
        self._progress.computed_len[self.slot] = length

    @property
    def num_inflight(self) -> int:
        """Plans in flight that name this sequence."""
        return 0 if self._progress is None else self._progress.num_inflight.item(self.slot)

    @num_inflight.setter
    def num_inflight(self, number: int) -> None:
        assert self._progress is not None
        self._progress.num_inflight[self.slot] = number

    @property
    def samples_left(self) -> int:
        """Tokens that may still be planned to be sampled: what is in flight counts."""
        if self.is_prefilling:
            return self.request.max_new_tokens - self.num_generated
        return max(0, self.end_len - self.planned_len)

    def look_when_planned(self) -> None:
        """Note when its decode row needs more than a row: beyond its pages, or at its end."""
        assert self._progress is not None
        self._progress.plan_look_at[self.slot] = min(self.held.capacity, self.end_len)

    def look_when_committed(self) -> None:
        """Note when a commit has more to do than to count its new token."""
        progress, computed_len = self._progress, self.computed_len
        assert progress is not None
        is_plain = (
            self.state is SequenceState.RUNNING
            and computed_len >= self.prefill_len
            and self.stop_matcher is None
            and not self.wants_scores
            and len(self.end_ids) <= MOST_END_IDS
        )
        progress.commit_look_at[self.slot] = self.end_len if is_plain else 0
        progress.upkeep_at[self.slot] = min(self.read_at, computed_len + progress.most_new)

    @property
    def upkeep_at(self) -> int:
        """``computed_len`` at which it has something due: see ``Scheduler``."""
        assert self._progress is not None
        return self._progress.upkeep_at.item(self.slot)

    # -- tokens --------------------------------------------------------------------------

    @property
    def known_ids(self) -> list[int]:
        """Prompt and committed output, the host's view of the tokens."""
        self.catch_up()
        return self._known_ids

    @property
    def record(self) -> TokenRecord:
        """What is true of each committed token."""
        self.catch_up()
        return self._record

    def catch_up(self) -> None:
        """Take the newest tokens into the record."""
        progress = self._progress
        if progress is None or not progress.num_new(self.slot):
            return
        token_ids, logprobs, epochs = progress.take_new(self.slot)
        self._known_ids += token_ids
        self._record.extend(token_ids, logprobs, epochs)
        if self.request.is_streamed:
            self.num_emitted += len(token_ids)
        if self.captured is not None:  # memory is of one epoch
            self.captured.forwarded(self.computed_len, epochs[-1])

    @property
    def num_generated(self) -> int:
        """Committed tokens."""
        return self.known_len - self.prompt_len

    @property
    def known_len(self) -> int:
        """Tokens the host knows: prompt and committed output."""
        num_new = 0 if self._progress is None else self._progress.num_new(self.slot)
        return len(self._known_ids) + num_new

    @property
    def is_prefilling(self) -> bool:
        """True while tokens that only the host knows are left to forward."""
        return self.planned_len < self.prefill_len

    @property
    def usage(self) -> Usage:
        """Token counts as committed."""
        return Usage(
            prompt_tokens=self.prompt_len,
            completion_tokens=self.num_generated,
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

    def score(self, row: int, *, first: int, count: int, is_prompt: bool) -> Score:
        """Return what a row of this sequence reports beside its token's own logprob."""
        logprobs = self.request.logprobs
        return Score(
            row,
            first,
            count,
            logprobs.top_logprobs_num,
            len(logprobs.token_ids_logprob),
            is_prompt,
            MAX_MASK_IDS if logprobs.sampling_mask and not is_prompt else 0,
        )

    def score_targets(self, start: int, width: int) -> range:
        """Return the prompt positions to score when ``[start, start + width)`` is forwarded."""
        first = max(start + 1, self.planned_score)
        return range(first, max(first, min(start + width + 1, self.prompt_len)))

    @property
    def has_news(self) -> bool:
        """True if tokens are to be told that no event has had."""
        return self.request.is_streamed and self.num_emitted < len(self.record)

    @property
    def has_rows_to_stream(self) -> bool:
        """True if it goes on, and rows are to be told that no event has had."""
        if self.captured is None or not self.request.capture.interval:
            return False
        return self.captured.has_news and self.state is SequenceState.RUNNING

    def append(self, token_id: int, logprob: float, epoch: int, scores: TokenScores | None) -> None:
        """Commit one sampled token."""
        self.catch_up()
        self._known_ids.append(token_id)
        self._record.append(token_id, logprob, epoch, scores)

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

    def expect_rows(self) -> None:
        """Raise InvariantError if a token that was forwarded has no row on record."""
        captured = self.captured
        if captured is not None and captured.recorded < self.computed_len:
            raise InvariantError(
                f"a sequence ends with rows of {captured.recorded} positions; {self.computed_len} "
                "have been forwarded"
            )

    def enter(self, slot: int, generation: int, progress: Progress) -> None:
        """Live in a slot from now on."""
        self.slot, self.generation, self._progress = slot, generation, progress
        progress.enter(slot, self.end_ids, is_streamed=self.request.is_streamed)

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

    def leave(self, state: SequenceState) -> None:
        """Be planned no more; what is in flight is still to be committed."""
        self.state = state
        self.look_when_committed()

    def read_until(self, end: int) -> None:
        """Note that a read-out is planned of all rows before ``end``."""
        assert self.captured is not None
        self.captured.planned = end
        self.read_at = self._next_read_at(self.captured)

    def _next_read_at(self, captured: CapturedColumns) -> int:
        """Return where rows are due: at intervals; else behind the prompt, and before the end."""
        done, interval = max(captured.recorded, captured.planned), self.request.capture.interval
        if interval:
            return done + interval
        last = self.end_len + 1 - LATE_ROWS
        return next((at for at in (self.prefill_len, last) if at - done >= EARLY_ROWS), NEVER)

    def begin_again(self) -> None:
        """Under new weights, forget the old ones' view of the prompt, unless a token came of it.

        Rows that an event has had stay.
        """
        if self.num_generated:
            return
        self.scored = self.planned_score = _first_score(self.request)
        self.prompt_scores = []
        captured = self.captured
        if captured is not None and not captured.has_left:
            self.captured = CapturedColumns(
                captured.specs, start=captured.start, max_rows=captured.max_rows
            )

    def forget_memory(self) -> None:
        """Go back to the state before any forward; the record stays."""
        self.catch_up()
        self._progress = None
        self.slot = self.generation = -1
        self.holding = None
        self.num_pages_sent = []
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
    biases = [(token, value, NEVER) for token, value in (sampling.logit_bias or {}).items()]
    if sampling.min_new_tokens:
        until = len(request.prompt_token_ids) + sampling.min_new_tokens
        biases += [
            (token_id, -math.inf, until) for token_id in sorted(_end_ids(request, eos_token_ids))
        ]
    return biases
