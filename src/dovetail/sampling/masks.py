"""The support of a draw: the tokens that it could have drawn.

Owns how it is read off a draw. It is the draw's own, never worked out again: a second computation
may cut elsewhere at ties. Must not know requests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.kernels import api


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that one draw could have drawn.

    Attributes:
        ids_S: int64, ascending; empty if truncation cut nothing off.
        logprob: of the drawn token, among those.
    """

    ids_S: Tensor
    logprob: float


def support_of(draws: api.Draws, index: int, *, is_greedy: bool) -> Support:
    """Return the support of one draw; a greedy one could have drawn nothing else."""
    drawn = draws.ids_N[index]
    if is_greedy:
        return Support(drawn[None], 0.0)
    scaled_V, outside_NV = draws.scaled_NV[index], draws.outside_NV
    log_total = torch.logsumexp(scaled_V, dim=-1)
    ids_S = drawn.new_empty(0)
    if outside_NV is not None and bool(outside_NV[index].any()):
        # An id at -inf was forbidden, whatever truncation says of it.
        inside_V = ~outside_NV[index] & (scaled_V > -torch.inf)
        ids_S = torch.nonzero(inside_V).view(-1)
        log_total = torch.logsumexp(scaled_V[ids_S], dim=-1)
    return Support(ids_S, float(scaled_V[drawn] - log_total))
