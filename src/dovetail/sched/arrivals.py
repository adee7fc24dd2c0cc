"""From a request to its sequences, each with its place in line."""

from collections.abc import Callable
from functools import partial

from dovetail.config.schema import EngineConfig
from dovetail.sched.policy import rank
from dovetail.sched.sequence import Sequence
from dovetail.sched.stop import stop_matcher
from dovetail.wire.request import Request


class Arrivals:
    """Makes sequences. Owns the order in which they came.

    Args:
        config: the engine's.
        token_bytes: the bytes that each token contributes to the text.
        special_ids: tokens that say nothing in a request that skips them.
    """

    def __init__(
        self,
        config: EngineConfig,
        token_bytes: Callable[[int], bytes],
        special_ids: frozenset[int],
    ) -> None:
        self._config = config
        self._columns = config.columns
        self._eos_token_ids = frozenset(config.model.eos_token_ids)
        self._stop_matcher = partial(stop_matcher, token_bytes, special_ids)
        self._num_arrivals = 0

    def sequences(self, request: Request) -> list[Sequence]:
        """Return a sequence for each of the request's ``n`` generations, behind all before it."""
        return [self._sequence(request, index) for index in range(request.sampling.n)]

    def _sequence(self, request: Request, sample_index: int) -> Sequence:
        arrival, self._num_arrivals = self._num_arrivals, self._num_arrivals + 1
        return Sequence(
            request,
            sample_index=sample_index,
            rank=rank(self._config.policy, priority=request.priority, arrival=arrival),
            eos_token_ids=self._eos_token_ids,
            stop_matcher=self._stop_matcher(request.sampling),
            columns=self._columns,
        )
