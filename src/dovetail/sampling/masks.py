"""The support of a draw: the tokens that it could have drawn.

Owns how it is read off a draw. It is the draw's own, never worked out again: a second computation
may cut elsewhere at ties. How many tokens there are is known on the device alone, so the ids lie in
a buffer of fixed size, and nothing here waits for them. Must not know requests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.kernels import api


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that one draw could have drawn.

    Attributes:
        num_ids: int64 [], how many there are; 0 if truncation cut nothing off.
        ids_S: int64, the first S of them, ascending; beyond ``num_ids``, junk.
        logprob: float32 [], of the drawn token, among those.
    """

    num_ids: Tensor
    ids_S: Tensor
    logprob: Tensor


def support_of(draws: api.Draws, index: int, *, is_greedy: bool, max_ids: int) -> Support:
    """Return the support of one draw, up to ``max_ids`` of it; a greedy one is its token alone."""
    drawn = draws.ids_N[index]
    if is_greedy:
        ids_S = drawn.new_zeros(max_ids)
        ids_S[:1] = drawn
        return Support(torch.ones_like(drawn), ids_S, draws.logprobs_N.new_zeros(()))
    scaled_V = draws.scaled_NV[index]
    inside_V = scaled_V > -torch.inf  # an id at -inf was forbidden, whatever truncation says of it
    is_cut = torch.zeros((), dtype=torch.bool, device=scaled_V.device)
    if draws.outside_NV is not None:
        outside_V = draws.outside_NV[index]
        inside_V, is_cut = inside_V & ~outside_V, outside_V.any()
    rank_V = inside_V.cumsum(0)
    place_V = torch.where(inside_V & (rank_V <= max_ids), rank_V - 1, max_ids)
    ids_V = torch.arange(len(scaled_V), device=scaled_V.device)
    ids_S = drawn.new_zeros(max_ids + 1).scatter_(0, place_V, ids_V)[:max_ids]
    log_total = torch.logsumexp(scaled_V.masked_fill(~inside_V, -torch.inf), dim=-1)
    # Not by indexing: a number on the device as an index is waited for.
    logprob = scaled_V.gather(0, drawn[None])[0] - log_total
    return Support(torch.where(is_cut, rank_V[-1], 0), ids_S, logprob)
