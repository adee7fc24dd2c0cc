"""A finished generation as the reply object of SGLang's native ``/generate``."""

from typing import Any

from dovetail.core.generation import Generation


def generate_reply(
    generation: Generation, *, label: str, with_logprobs: bool = True
) -> dict[str, Any]:
    """Return the reply as plain JSON-able values.

    Args:
        generation: what to report.
        label: the request's id as the client knows it.
        with_logprobs: include ``output_token_logprobs``, a list of
            ``[logprob, token id, None]``.
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
    if with_logprobs:
        meta_info["output_token_logprobs"] = [
            [logprob, token_id, None]
            for logprob, token_id in zip(generation.logprobs, generation.token_ids, strict=True)
        ]
    return {
        "text": generation.text,
        "output_ids": list(generation.token_ids),
        "meta_info": meta_info,
    }


def _finish_reason(generation: Generation) -> dict[str, Any]:
    reason = generation.finish_reason
    match reason.type:
        case "stop":
            return {"type": "stop", "matched": reason.matched}
        case "length":
            return {"type": "length", "length": len(generation.token_ids)}
        case _:
            return {"type": reason.type, "message": reason.message}
