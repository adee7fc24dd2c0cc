"""When a generation ends: the rules, in the order in which they are asked."""

from dovetail.sched.plan import RowStatus
from dovetail.sched.sequence import Sequence
from dovetail.wire.result import FinishReason
from dovetail.wire.validate import MAX_MASK_IDS

ABORTED = FinishReason(type="abort")
LENGTH = FinishReason(type="length")

_FAILURES = {
    RowStatus.NON_FINITE: "the model produced logits that are not finite",
    RowStatus.EMPTY_SUPPORT: "no token was left to sample from",
    RowStatus.LARGE_SUPPORT: f"the sampling mask of a token has more than {MAX_MASK_IDS} ids; "
    f"lower top_k (to {MAX_MASK_IDS} at most) or top_p",
}


def failure_of(status: RowStatus) -> FinishReason:
    """Return why a row that is not OK ends its sequence."""
    return FinishReason(type="error", message=_FAILURES[status])


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
