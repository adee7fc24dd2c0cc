# pyright: strict
"""The top-k of a router, seen and answered while its ``forward`` runs.

Owns the interception of one call of one router. Everything before the last top-k (logits, scores,
biases, groups) and everything after it (normalising, scaling, casting) is the model's own code;
only *which* experts were selected is answered from outside, with the values at those places of
the very scores that the call was given. So the router keeps its gradient (arXiv 2510.11370), and
a family needs no code of its own.

Routers that limit a token to some groups of experts first select groups, by a top-k of their own.
Scores outside of them are masked and would make the weight of a foreign expert zero, so that
selection is answered too: with the groups of the experts to come, beside the live ones.

Shape legend: N tokens, E experts, K experts of a token, G groups, Q selected groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dovetail.replay.errors import ReplayError

_TOPK: tuple[Any, ...] = (torch.topk, Tensor.topk)


@dataclass(frozen=True, slots=True)
class Selection:
    """What a router selects from: K of E experts, after Q of G groups if it has groups."""

    num_experts: int
    num_selected: int
    num_groups: int | None = None


class TopK(NamedTuple):
    """What a top-k gives: both [N, K]."""

    values: Tensor
    indices: Tensor


class Chooser(Protocol):
    """Says which experts a call of a router selects."""

    def groups(self, num_tokens: int, num_groups: int, live_NQ: Tensor) -> Tensor:
        """Return the groups to keep, int64 [N, any]; those of ``live_NQ`` must be among them."""
        ...

    def experts(self, scores_NE: Tensor, live: TopK, ranked_NE: Tensor) -> TopK:
        """Return the experts to use, and ``scores_NE`` at them in memory of their own.

        ``ranked_NE`` is what the live router ranks: -inf outside of the groups that it selected.
        """
        ...


class Call(NamedTuple):
    """A top-k that some code asks for."""

    scores: Tensor
    k: int
    run: Callable[[Tensor], Any]  # the same top-k of other scores


def topk_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return the top-k that this torch function is, over the last axis; None if it is another."""
    if func not in _TOPK:
        return None
    named = dict(zip(("input", "k", "dim", "largest", "sorted"), args, strict=False)) | kwargs
    scores, dim = named.pop("input"), named.get("dim", -1)
    if dim not in (-1, scores.ndim - 1) or not named.get("largest", True):
        return None

    def run(other: Tensor) -> Any:
        return torch.topk(other, **named)

    return Call(scores, named["k"], run)


class RouterCall(TorchFunctionMode):
    """One call of a router, whose selection a chooser makes. Enter it around ``forward``.

    Attributes:
        num_selections: how often experts were selected; once, if the router is what it was.
    """

    def __init__(self, selection: Selection, chooser: Chooser) -> None:
        super().__init__()
        self.num_selections = 0
        self._selection = selection
        self._chooser = chooser
        self._live_groups: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer the two selections; run all else as it is."""
        kwargs = kwargs or {}
        call = topk_call(func, args, kwargs)
        if call is None or call.scores.ndim != 2:
            return func(*args, **kwargs)
        width, asked = call.scores.shape[-1], self._selection
        if width == asked.num_experts and call.k == asked.num_selected:
            return self._select_experts(call)
        if width == asked.num_groups:
            return self._select_groups(call)
        return func(*args, **kwargs)

    def _select_groups(self, call: Call) -> Any:
        live = call.run(call.scores)
        num_tokens, num_groups = call.scores.shape
        self._live_groups = torch.zeros_like(call.scores, dtype=torch.bool).scatter_(
            1, live.indices, True
        )
        groups = self._chooser.groups(num_tokens, num_groups, live.indices)
        return torch.return_types.topk((call.scores.gather(1, groups), groups))

    def _select_experts(self, call: Call) -> Any:
        self.num_selections += 1
        scores, ranked = call.scores, call.scores
        live = TopK(*call.run(scores))
        if self._live_groups is not None:  # other groups than the live ones are unmasked, too
            groups = self._live_groups
            outside = ~groups.repeat_interleave(scores.shape[1] // groups.shape[1], dim=1)
            ranked = scores.detach().masked_fill(outside, -torch.inf)
            indices = call.run(ranked).indices
            live = TopK(scores.gather(1, indices), indices)
        chosen = self._chooser.experts(scores, live, ranked)
        return torch.return_types.topk((chosen.values, chosen.indices))


def expect_one_selection(call: RouterCall, name: str) -> None:
    """Raise ReplayError if the router did not select experts exactly once."""
    if call.num_selections != 1:
        raise ReplayError(
            f"router {name} selected experts {call.num_selections} times in one call, not once: "
            "a fused or compiled router, or another model than the one that was probed"
        )
