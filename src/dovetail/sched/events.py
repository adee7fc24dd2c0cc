"""From a sequence's record to the events that a client sees."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dovetail.sched.plan import TokenScores
from dovetail.sched.sequence import Sequence
from dovetail.wire.capture import CapturedRows
from dovetail.wire.result import Scores, TokenEvent


def news_of(sequence: Sequence) -> TokenEvent:
    """Return an event with the tokens committed since the last one."""
    record, start = sequence.record, sequence.num_emitted
    # Rows may leave while a prompt is being scored. Its scores leave once, when all are there.
    has_begun = start == 0 and (len(record) > 0 or sequence.finish is not None)
    sequence.num_emitted = len(record)
    return TokenEvent(
        request_id=sequence.request.request_id,
        sample_index=sequence.sample_index,
        token_ids=tuple(record.token_ids[start:]),
        logprobs=tuple(record.logprobs[start:]),
        epochs=tuple(record.epochs[start:]),
        scores=_scores([part for part in record.scores[start:] if part is not None])
        if sequence.wants_scores
        else None,
        prompt_scores=_scores(sequence.prompt_scores) if has_begun else None,
        captured=_news_of_capture(sequence),
    )


def news_of_step(
    sequences: list[Sequence],
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    epoch: int,
) -> list[TokenEvent]:
    """Return an event a sequence with the one token that it got in a step.

    What they had before has been told.
    """
    epochs = (epoch,)
    return [
        TokenEvent(
            request_id=sequence.request.request_id,
            sample_index=sequence.sample_index,
            token_ids=(token_id,),
            logprobs=(logprob,),
            epochs=epochs,
        )
        for sequence, token_id, logprob in zip(
            sequences, token_ids.tolist(), logprobs.tolist(), strict=True
        )
    ]


def _news_of_capture(sequence: Sequence) -> dict[str, CapturedRows] | None:
    """Return the rows that are to leave before the end, if there are any."""
    captured = sequence.captured
    if captured is None or not sequence.request.capture.interval or not captured.has_news:
        return None
    return captured.news(is_last=False)


def last_event_of(sequence: Sequence) -> TokenEvent:
    """Return the event that ends the sequence."""
    captured = sequence.captured
    rows = None if captured is None else captured.news(is_last=True)
    return msgspec.structs.replace(
        news_of(sequence), finish=sequence.finish, usage=sequence.usage, captured=rows
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
        masks=tuple(tuple(p.mask_ids.tolist()) for p in parts if len(p.mask_logprobs)),
        mask_logprobs=tuple(x for part in parts for x in part.mask_logprobs.tolist()),
    )


def _rows(tables: list[NDArray[Any]]) -> tuple[tuple[Any, ...], ...]:
    """Return all rows of the tables; none if they have no columns: nobody asked for them."""
    return tuple(tuple(row) for table in tables if table.shape[1] for row in table.tolist())
