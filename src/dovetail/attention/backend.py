"""What a model layer may know of the step it runs in.

Owns the protocol between layers and attention backends. A layer sees its
tokens, their positions, and an ``attend`` function; where keys and values lie is
the backend's business.

Shape legend: T tokens, H query heads, K KV heads, D head dim.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dovetail.capture.rows import ExpertRecorder


class StepAttention(Protocol):
    """Attention of one step: rows, lengths and page tables are already bound."""

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Write k and v of the step's tokens, then attend causally within each row.

        Returns:
            [T, H, D], the dtype of ``q_THD``.
        """
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The step a forward belongs to; passed down, never ambient.

    Attributes:
        token_ids: int64 [T], input tokens.
        positions: int64 [T], absolute positions.
        kv_slots: int64 [T], flat index ``page * page_size + offset`` under which
            per-token state of each token is stored.
        attention: see ``StepAttention``.
        recorder: takes down the experts of the tokens; None in an engine that captures none.
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    attention: StepAttention
    recorder: ExpertRecorder | None = None
