"""May a waiting sequence start? Memory it will need, and prefixes it should wait for."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dovetail.cache.ledger import KVLedger
from dovetail.config.schema import EngineConfig
from dovetail.sched.sequence import Sequence

_FIRST_GUESS = 0.5
_MEMORY = 0.95
_RETRACTION_STEP = 0.1
_BACKOFF_STEPS = 16


class Backoff:
    """When memory that was short is asked for again, for to ask each step would cost each step.

    Those that run come nearer to their ends, so some steps later it may be enough. Whatever else
    may change the answer ends it.
    """

    def __init__(self) -> None:
        self._until = 0

    def begin(self, step: int) -> None:
        """Let some steps go by; memory was short in this one."""
        self._until = step + _BACKOFF_STEPS

    def end(self) -> None:
        """Ask again at once: memory was given back, or others wait for it."""
        self._until = 0

    def is_on(self, step: int) -> bool:
        """Whether memory is not asked for in this step."""
        return step < self._until


class LengthEstimate:
    """How much of ``max_new_tokens`` requests really use, learnt from those that ended.

    Starting a sequence whose output will not fit costs a retraction and a second
    prefill; reserving every ``max_new_tokens`` in full leaves memory idle. A moving
    average of the share that was used lies in between, and a retraction, which says
    that it was too low, raises it.

    Sequences do not end together, and each that ends leaves its memory to the others:
    what has to be there is the peak over time, not the sum of all ends ("past-future
    scheduler" of LightLLM, ASPLOS 2025, arXiv 2507.10150).
    """

    def __init__(self) -> None:
        self.share = _FIRST_GUESS

    def observe(self, sequence: Sequence) -> None:
        """Learn from a generation that ended by itself."""
        used = sequence.num_generated / max(sequence.request.max_new_tokens, 1)
        self.share = _MEMORY * self.share + (1 - _MEMORY) * used

    def observe_retraction(self) -> None:
        """Learn from a sequence that lost its memory."""
        self.share = min(1.0, self.share + _RETRACTION_STEP)

    def growth(self, sequences: Iterable[Sequence], page_size: int) -> int:
        """Return by how many tokens the sequences together are expected to grow at most.

        Each grows by one token a step until its expected end, a page at least.
        """
        known_and_left = [
            (
                sequence.known_len,
                max(
                    page_size,
                    int(self.share * sequence.request.max_new_tokens) - sequence.num_generated,
                ),
            )
            for sequence in sequences
        ]
        known_N, left_N = np.array(sorted(known_and_left, key=lambda pair: -pair[1])).T
        # When the i-th last ends, those that last longer are there, each as much longer.
        peak = (np.cumsum(known_N) + left_N * np.arange(1, len(left_N) + 1)).max()
        return max(0, int(peak - known_N.sum()))


class _Hold(NamedTuple):
    """Why a sequence waits: ``leader`` computes the first ``until`` tokens for it."""

    leader: Sequence
    until: int


class PrefixHolds:
    """Sequences that are computing prompts which others wait to share.

    A group of equal prompts arrives at once; if all start at once, all compute the same
    prefix. So a sequence that shares more full pages with a running prefill than are
    published is held back until they are, or until that prefill ends.

    Owns an index of running prefills by their first page, and who waits for whom: two
    prompts are compared once, not in each step.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._page_size = config.page_size
        self._is_active = config.prefix_cache
        self._leaders: dict[tuple[bytes, tuple[int, ...]], dict[Sequence, None]] = {}
        self._holds: dict[Sequence, _Hold] = {}

    def add(self, sequence: Sequence) -> None:
        """Remember a sequence that starts its prefill."""
        if self._is_active and sequence.known_len > self._page_size:
            self._leaders.setdefault(self._key(sequence), {})[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, or whose prefill has: nobody waits for it, nor it."""
        self._holds.pop(sequence, None)
        leaders = self._leaders.get(self._key(sequence), {})
        if sequence in leaders:
            del leaders[sequence]
            if not leaders:
                del self._leaders[self._key(sequence)]

    def is_held(self, sequence: Sequence, ledger: KVLedger) -> bool:
        """True if ``sequence`` should wait for somebody's prefill."""
        if not self._is_active or sequence.known_len <= self._page_size:
            return False
        leaders = self._leaders.get(self._key(sequence))
        if not leaders:
            return False
        hold = self._holds.get(sequence)
        if hold is not None and hold.leader in leaders and hold.leader.computed_len < hold.until:
            return True
        hold = self._find(sequence, leaders, ledger)
        if hold is None:
            self._holds.pop(sequence, None)
            return False
        self._holds[sequence] = hold
        return True

    def _find(
        self, sequence: Sequence, leaders: Iterable[Sequence], ledger: KVLedger
    ) -> _Hold | None:
        cached = ledger.match_len(
            sequence.request.namespace, sequence.known_ids, max_cached=sequence.max_cached_len
        )
        for leader in leaders:
            until = self._shared_len(sequence, leader)
            if until > max(cached, leader.computed_len):
                return _Hold(leader, until)
        return None

    def _shared_len(self, sequence: Sequence, leader: Sequence) -> int:
        """Return the tokens of full pages that both begin with and ``sequence`` could reuse."""
        size, mine, theirs = self._page_size, sequence.known_ids, leader.known_ids
        most = min(sequence.max_cached_len, leader.prefill_len) // size * size
        shared = 0
        while shared < most and mine[shared : shared + size] == theirs[shared : shared + size]:
            shared += size
        return shared

    def _key(self, sequence: Sequence) -> tuple[bytes, tuple[int, ...]]:
        return sequence.request.namespace, tuple(sequence.known_ids[: self._page_size])
