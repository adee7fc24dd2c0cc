"""When a generation ends, and what is said of it: rules, in the order in which they are asked."""

from dovetail.sched.plan import RowStatus
from dovetail.sched.sequence import Sequence, SequenceState
from dovetail.wire.result import FinishReason
from dovetail.wire.validate import MAX_MASK_IDS

LENGTH = FinishReason(type="length")
ABORTED = FinishReason(type="abort", message="Aborted while it was generated")
ABORTED_EARLY = FinishReason(type="abort", message="Abort before prefill: it had not started")
"""Rollout clients look for its first words."""

ABORTED_IN_PROMPT = FinishReason(type="abort", message="Aborted in its prompt")

_FAILURES = {
    RowStatus.NON_FINITE: FinishReason(
        type="error", message="the model produced logits that are not finite"
    ),
    RowStatus.EMPTY_SUPPORT: FinishReason(type="error", message="no token was left to sample from"),
    RowStatus.LARGE_SUPPORT: FinishReason(
        type="error",
        field="return_sampling_mask",
        message=f"the sampling mask of a token has more than {MAX_MASK_IDS} ids; give top_k of "
        f"{MAX_MASK_IDS} at most, a lower top_p or a higher min_p",
    ),
}


def aborted(sequence: Sequence) -> FinishReason:
    """Return why a sequence ends that is aborted now."""
    if sequence.num_generated:
        return ABORTED
    return ABORTED_EARLY if sequence.state is SequenceState.WAITING else ABORTED_IN_PROMPT


def failure_of(status: RowStatus) -> FinishReason:
    """Return why a row that is not OK ends its sequence."""
    return _FAILURES[status]


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
    if sequence.num_generated == sequence.request.max_new_tokens:
        return LENGTH
    return None
