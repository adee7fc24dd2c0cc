"""The table of rotary angles of a model.

Owns frequencies and table; the rotation itself is a kernel.

Shape legend: T tokens, D head dim, P positions, F frequencies (D / 2).
"""

import math

import torch
from torch import Tensor, nn

from dovetail.attention.backend import Rotation
from dovetail.config.model import RopeConfig


class Rotary(nn.Module):
    """The angles of each position; one table for all layers of a model."""

    cos_sin_P2D: Tensor

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, *, device: torch.device
    ) -> None:
        super().__init__()
        positions_P = torch.arange(max_positions, dtype=torch.float32)
        angles_PF = torch.outer(positions_P, rope_frequencies(rope, head_dim))
        cos_PF, sin_PF = angles_PF.cos(), angles_PF.sin()
        table_P2D = torch.cat((cos_PF, cos_PF, -sin_PF, sin_PF), dim=1).view(-1, 2, head_dim)
        self.register_buffer("cos_sin_P2D", table_P2D.to(device), persistent=False)

    def forward(self, positions_T: Tensor) -> Rotation:
        """Look up the positions, int64, each below ``max_positions``: once a step."""
        cos_sin_T2D = self.cos_sin_P2D[positions_T]
        cos_T1D, sin_T1D = cos_sin_T2D.chunk(2, dim=1)
        return Rotation(cos_T1D, sin_T1D, cos_sin_T2D)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of dimensions, float32 [F].

    Source of "llama3": "The Llama 3 Herd of Models", arXiv 2407.21783, and its released code.
    """
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain_F = 1.0 / rope.theta**exponents_F
    slow_F = plain_F / rope.factor
    if rope.type != "llama3":
        return slow_F  # "default" has factor 1

    # How many turns a pair makes within the original context says how far it is slowed down:
    # below low_freq_factor turns fully, above high_freq_factor not at all, linearly in between.
    turns_F = rope.original_max_position_embeddings * plain_F / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    plain_share_F = ((turns_F - rope.low_freq_factor) / span).clamp(0, 1)
    return (1 - plain_share_F) * slow_F + plain_share_F * plain_F
