"""How many logprobs a reply may list.

Owns the bound, over all that one call asks for. Everything else in a reply is bounded by the tokens
that the engine makes; only lists of further ids multiply them, and with them the memory that
a reply takes before it is sent, and the time for which encoding it stops all others.
"""

from collections.abc import Sequence

from dovetail.errors import RequestError
from dovetail.wire.request import Request

MAX_LISTED = 2**23
"""Pairs of id and logprob beside those of the chosen tokens: some 2 GB before they are sent, 290 MB
of JSON, and 0.7 s of the event loop (230 and 34 bytes and 80 ns a pair, measured)."""


def check_listed(requests: Sequence[Request]) -> None:
    """Refuse a call whose reply could not be made without harm to others.

    Raises:
        RequestError: it lists too many logprobs; names the larger of the two fields.
    """
    listed = sum(map(_num_listed, requests))
    if listed <= MAX_LISTED:
        return
    widest = max(requests, key=_width).logprobs
    num_top, num_asked = widest.top_logprobs_num, len(widest.token_ids_logprob)
    raise RequestError(
        "token_ids_logprob" if num_asked > num_top else "top_logprobs_num",
        f"asks for up to {listed} logprobs over all tokens and samples, and a reply lists at most "
        f"{MAX_LISTED}; list fewer for each token, give fewer tokens (their bound is the rest of "
        "the context where none is given for a chat), or send fewer prompts and samples at once",
    )


def _width(request: Request) -> int:
    return request.logprobs.top_logprobs_num + len(request.logprobs.token_ids_logprob)


def _num_listed(request: Request) -> int:
    begin, prompt_len = request.logprobs.logprob_start_len, len(request.prompt_token_ids)
    num_scored = prompt_len - begin if begin >= 0 else 0
    return _width(request) * request.sampling.n * (request.max_new_tokens + num_scored)
