# pyright: strict
"""What the trainer's own routers would have chosen while the rollout's choice was replayed.

Owns ``LiveRouting``. It is measured on the replayed hidden states: layer by layer, given that all
layers before it did what the rollout did. How often free-running routers differ is a matter of
two records; see ``compare_traces``.

Shape legend: N tokens, L routers, K experts of a token.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.replay.records import RouteTrace


@dataclass(frozen=True, slots=True, eq=False)
class LiveRouting:
    """The live top-k beside the replayed one, of one forward.

    Attributes:
        overlap_NL: int64, experts that both selected, of K; K where nothing was replayed.
        margin_NL: float32, between the last selected and the first unselected expert, in the
            scores that the router selects by. Small margins flip first.
        has_row_N: bool, tokens that were replayed.
        num_experts_per_tok: K.
        num_missing: tokens that should have been replayed and had no row.
    """

    overlap_NL: Tensor
    margin_NL: Tensor
    has_row_N: Tensor
    num_experts_per_tok: int
    num_missing: int

    @property
    def differs_NL(self) -> Tensor:
        """Bool: the live router would have selected another set."""
        return self.overlap_NL < self.num_experts_per_tok

    def summary(self) -> dict[str, float]:
        """Return the numbers, over tokens that were replayed.

        ``router_diff``: share of (token, layer) whose sets differ. ``slot_overlap``: share of
        slots in common. ``token_any_diff``: share of tokens that differ in some layer.
        ``layers_per_token``: layers that differ, of a token on average. ``margin_p5`` and
        ``margin_p50``: of the margins. ``coverage``: tokens replayed, of those that should be.
        ``num_tokens``, ``num_missing``, ``num_live``: tokens replayed; without a row though
        they should have one; without a row in all, pads and last tokens among them.
        """
        replayed = self.has_row_N
        count = int(replayed.sum())
        differs = self.differs_NL[replayed].double()
        margins = self.margin_NL[replayed].double()
        overlap = self.overlap_NL[replayed].double() / self.num_experts_per_tok
        quantiles = _quantiles(margins, (0.05, 0.5))
        return {
            "router_diff": float(differs.mean()) if count else 0.0,
            "slot_overlap": float(overlap.mean()) if count else 1.0,
            "token_any_diff": float(differs.amax(1).mean()) if count else 0.0,
            "layers_per_token": float(differs.sum(1).mean()) if count else 0.0,
            "margin_p5": quantiles[0],
            "margin_p50": quantiles[1],
            "coverage": count / (count + self.num_missing) if count else 0.0,
            "num_tokens": float(count),
            "num_missing": float(self.num_missing),
            "num_live": float(len(replayed) - count),
        }

    def by_layer(self) -> dict[str, list[float]]:
        """Return ``router_diff``, ``margin_p5`` and ``margin_p50`` of each layer."""
        differs, margins = self.differs_NL[self.has_row_N], self.margin_NL[self.has_row_N]
        quantiles = [_quantiles(column.double(), (0.05, 0.5)) for column in margins.unbind(1)]
        return {
            "router_diff": [float(column.double().mean()) for column in differs.unbind(1)],
            "margin_p5": [low for low, _ in quantiles],
            "margin_p50": [middle for _, middle in quantiles],
        }


def overlap_of(a_NK: Tensor, b_NK: Tensor) -> Tensor:
    """Return how many ids two rows have in common, int64 [N]; ids within a row are distinct."""
    return (a_NK[:, :, None] == b_NK[:, None, :]).sum((1, 2))


def margin_of(ranked_NE: Tensor, live_NK: Tensor) -> Tensor:
    """Return the score of the last selected less that of the first unselected, float32 [N]."""
    ranked_NE = ranked_NE.detach()
    last_N = ranked_NE.gather(1, live_NK).amin(1)
    next_N = ranked_NE.scatter(1, live_NK, -torch.inf).amax(1)  # cheaper than a second top-k
    return (last_N - next_N).float()


def compare_traces(a: RouteTrace, b: RouteTrace) -> NDArray[np.int64]:
    """Return how many experts two traces of the same tokens have in common, [rows, layers].

    Raises:
        ValueError: the traces are not of the same tokens, positions and layers.
    """
    for name in ("start", "layer_ids", "num_experts", "token_digest"):
        if getattr(a, name) != getattr(b, name):
            raise ValueError(f"the traces differ in {name}; compare rows of the same tokens")
    return (a.ids[..., :, None] == b.ids[..., None, :]).sum((2, 3))


def _quantiles(values: Tensor, at: tuple[float, float]) -> tuple[float, float]:
    if not values.numel():
        return (torch.nan, torch.nan)
    low, high = np.quantile(values.cpu().numpy(), at)
    return (float(low), float(high))
