"""A finished generation as the reply object of SGLang's native ``/generate``.

Owns the reply's shape. Strict JSON: what is no finite number (the logprob of an id that cannot be
drawn) is null.
"""

import math
from collections.abc import Iterable
from typing import Any

from dovetail.core.generation import Generation
from dovetail.wire.request import LogprobParams

Triple = list[float | int | None]


def generate_reply(
    generation: Generation, *, label: str, logprobs: LogprobParams | None
) -> dict[str, Any]:
    """Return the reply as plain JSON-able values.

    Args:
        generation: what to report.
        label: the request's id as the client knows it.
        logprobs: what the request asked for; None leaves all logprobs out. A logprob is a triple
            ``[logprob, token id, None]``; the last place is SGLang's for text.
    """
    usage = generation.usage
    meta_info: dict[str, Any] = {
        "id": label,
        "finish_reason": _finish_reason(generation),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "num_retractions": usage.num_retractions,
        "weight_version": str(generation.weight_versions[-1] if generation.weight_versions else 0),
        "sampling_seed": generation.seed,
    }
    if logprobs is not None:
        meta_info |= _output_logprobs(generation, logprobs)
        if logprobs.logprob_start_len >= 0:
            meta_info |= _input_logprobs(generation, logprobs)
    return {
        "text": generation.text,
        "output_ids": list(generation.token_ids),
        "meta_info": meta_info,
    }


def _output_logprobs(generation: Generation, asked: LogprobParams) -> dict[str, Any]:
    reply: dict[str, Any] = {
        "output_token_logprobs": [
            _triple(logprob, token_id)
            for logprob, token_id in zip(generation.logprobs, generation.token_ids, strict=True)
        ]
    }
    if asked.top_logprobs_num:
        reply["output_top_logprobs"] = [_top(row) for row in generation.top_logprobs]
    if asked.token_ids_logprob:
        reply["output_token_ids_logprobs"] = [
            _of_ids(row, asked.token_ids_logprob) for row in generation.id_logprobs
        ]
    if asked.sampling_mask:
        reply["output_token_sampling_mask"] = [list(ids) for ids in generation.sampling_mask]
        reply["output_token_sampling_logprobs"] = list(generation.mask_logprobs)
    return reply


def _input_logprobs(generation: Generation, asked: LogprobParams) -> dict[str, Any]:
    """An entry a prompt token from ``logprob_start_len`` on; there is none for position 0."""
    start = asked.logprob_start_len
    token_ids = generation.prompt_token_ids[start : start + len(generation.prompt_logprobs)]
    reply: dict[str, Any] = {
        "input_token_logprobs": [
            _triple(logprob, token_id)
            for logprob, token_id in zip(generation.prompt_logprobs, token_ids, strict=True)
        ]
    }
    nothing = [None] if start == 0 else []
    if asked.top_logprobs_num:
        rows = [_top(row) for row in generation.prompt_top_logprobs]
        reply["input_top_logprobs"] = nothing + rows
    if asked.token_ids_logprob:
        ids = asked.token_ids_logprob
        reply["input_token_ids_logprobs"] = nothing + [
            _of_ids(row, ids) for row in generation.prompt_id_logprobs
        ]
    return reply


def _top(row: Iterable[tuple[int, float]]) -> list[Triple]:
    return [_triple(logprob, token_id) for token_id, logprob in row]


def _of_ids(row: Iterable[float], token_ids: Iterable[int]) -> list[Triple]:
    return [_triple(logprob, token_id) for logprob, token_id in zip(row, token_ids, strict=True)]


def _triple(logprob: float | None, token_id: int) -> Triple:
    is_number = logprob is not None and math.isfinite(logprob)
    return [logprob if is_number else None, token_id, None]


def _finish_reason(generation: Generation) -> dict[str, Any]:
    reason = generation.finish_reason
    match reason.type:
        case "stop":
            return {"type": "stop", "matched": reason.matched}
        case "length":
            return {"type": "length", "length": len(generation.token_ids)}
        case _:
            return {"type": reason.type, "message": reason.message}
