"""What leaves the engine: token events, finish reasons, usage.

Owns the shapes only. Text is made from token ids outside the engine loop
(``dovetail.text.stream``), so none of it appears here.
"""

from typing import Literal

import msgspec

from dovetail.wire.capture import CapturedRows


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a generation ended.

    Attributes:
        type: ``stop`` (end-of-sequence id, stop id or stop string), ``length``
            (``max_new_tokens`` or the context), ``abort`` (asked for by the
            client) or ``error``.
        matched: the stop id or stop string that ended it, or None.
        message: what went wrong, for ``error``; how far it was, for ``abort``.
        field: the request's field that asked for too much, for an ``error`` that is the client's to
            mend; None for one that is not.
    """

    type: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    message: str | None = None
    field: str | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one generation.

    Attributes:
        prompt_tokens: length of the prompt.
        completion_tokens: generated tokens, a matched stop id included.
        cached_tokens: prompt tokens whose KV came from the prefix cache.
        num_retractions: how often the sequence lost its memory and was recomputed.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    num_retractions: int = 0


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities beside the chosen tokens' own, position by position.

    Attributes:
        logprobs: of the known tokens, for prompt positions; empty for generated ones,
            whose logprobs stand in the event.
        top_ids, top_logprobs: the likeliest ids, likeliest first; empty if not asked for.
        id_logprobs: of the ids that were asked for, in their order; empty if not asked for.
        masks: the tokens that each draw could have drawn, ascending; none of them for a draw that
            truncation cut nothing off. Empty if not asked for.
        mask_logprobs: of the chosen tokens among those.
    """

    logprobs: tuple[float, ...] = ()
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    id_logprobs: tuple[tuple[float, ...], ...] = ()
    masks: tuple[tuple[int, ...], ...] = ()
    mask_logprobs: tuple[float, ...] = ()


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """News of one request: the tokens committed since its last event.

    Attributes:
        request_id: the engine's id of the request.
        sample_index: which of the request's ``n`` generations.
        token_ids: newly committed ids, in order; may be empty in a last event, and where there are
            captured rows.
        logprobs: natural-log probability of each of ``token_ids`` in the forward
            that sampled it.
        epochs: weights epoch of the forward that sampled each token.
        scores: for a request that asks, one entry a token.
        prompt_scores: for a request that asks, with its first token, or its end where there is
            none: one entry for each prompt position from ``logprob_start_len`` on, position 0 left
            out.
        finish: set in the last event of a generation, and only there.
        usage: set with ``finish``.
        captured: column name -> rows, for the columns that the request asked to capture: those
            recorded since the last event that had some. Set with ``finish``, and before for a
            request that asks.
    """

    request_id: int
    sample_index: int = 0
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    epochs: tuple[int, ...]
    scores: Scores | None = None
    prompt_scores: Scores | None = None
    finish: FinishReason | None = None
    usage: Usage | None = None
    captured: dict[str, CapturedRows] | None = None
