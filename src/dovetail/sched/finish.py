"""When a generation ends: the rules, in the order in which they are asked."""

from dovetail.sched.sequence import Sequence
from dovetail.wire.result import FinishReason

ABORTED = FinishReason(type="abort")
LENGTH = FinishReason(type="length")


def finish_after(sequence: Sequence, token_id: int) -> FinishReason | None:
    """Return why ``sequence`` ends with ``token_id``, its newest token, or None.

    An id rule comes before a stop string, and both before the length limit, so a
    stop on the very last allowed token is reported as a stop.
    """
    if token_id in sequence.end_ids:
        return FinishReason(type="stop", matched=token_id)
    if sequence.stop_matcher is not None:
        matched = sequence.stop_matcher.push(token_id)
        if matched is not None:
            return FinishReason(type="stop", matched=matched)
    if sequence.samples_left == 0 and sequence.pending_samples == 0:
        return LENGTH
    return None
