"""When a generation ends: the rules, in the order in which they are asked."""

from dovetail.sched.sequence import Sequence
from dovetail.wire.result import FinishReason

ABORTED = FinishReason(type="abort")
LENGTH = FinishReason(type="length")


def finish_after(sequence: Sequence, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Return why ``sequence`` ends with its newest token, or None.

    An id rule comes before a stop string, and both before the length limit, so a
    stop on the very last allowed token is reported as a stop.
    """
    sampling, token_id = sequence.request.sampling, sequence.known_ids[-1]
    if sampling.stop_token_ids and token_id in sampling.stop_token_ids:
        return FinishReason(type="stop", matched=token_id)
    if token_id in eos_token_ids and not sampling.ignore_eos:
        return FinishReason(type="stop", matched=token_id)
    if sequence.stop_matcher is not None:
        matched = sequence.stop_matcher.push(token_id)
        if matched is not None:
            return FinishReason(type="stop", matched=matched)
    if len(sequence.record) >= sequence.request.max_new_tokens:
        return LENGTH
    return None
