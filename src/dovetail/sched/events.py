"""From a sequence's record to the events that a client sees."""

from typing import Any

from numpy.typing import NDArray

from dovetail.sched.plan import TokenScores
from dovetail.sched.sequence import Sequence
from dovetail.wire.result import Scores, TokenEvent
from dovetail.wire.tensor import TensorEnvelope


def news_of(sequence: Sequence) -> TokenEvent:
    """Return an event with the tokens committed since the last one."""
    return _event(sequence, is_last=False)


def last_event_of(sequence: Sequence) -> TokenEvent:
    """Return the event that ends the sequence."""
    return _event(sequence, is_last=True)


def _event(sequence: Sequence, *, is_last: bool) -> TokenEvent:
    record, start = sequence.record, sequence.num_emitted
    is_first = start == 0
    sequence.num_emitted = len(record)
    return TokenEvent(
        request_id=sequence.request.request_id,
        sample_index=sequence.sample_index,
        token_ids=tuple(record.token_ids[start:]),
        logprobs=tuple(record.logprobs[start:]),
        epochs=tuple(record.epochs[start:]),
        scores=_scores([s for s in record.scores[start:] if s is not None])
        if sequence.wants_scores
        else None,
        prompt_scores=_scores(sequence.prompt_scores) if is_first else None,
        finish=sequence.finish if is_last else None,
        usage=sequence.usage if is_last else None,
        captured={name: TensorEnvelope.pack(a) for name, a in sequence.captured.items()}
        if is_last and sequence.captured is not None
        else None,
    )


def _scores(parts: list[TokenScores]) -> Scores | None:
    """Return the parts as one, or None if there are none."""
    if not parts:
        return None
    return Scores(
        logprobs=tuple(x for part in parts for x in part.logprobs.tolist()),
        top_ids=_rows([part.top_ids for part in parts]),
        top_logprobs=_rows([part.top_logprobs for part in parts]),
        id_logprobs=_rows([part.id_logprobs for part in parts]),
    )


def _rows(tables: list[NDArray[Any]]) -> tuple[tuple[Any, ...], ...]:
    """Return all rows of the tables; none if they have no columns: nobody asked for them."""
    return tuple(tuple(row) for table in tables if table.shape[1] for row in table.tolist())
