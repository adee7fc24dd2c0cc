"""What the engine asks of a model.

Shape legend: T tokens, N rows, M model dim, V vocabulary.
"""

from typing import Protocol

from torch import Tensor

from dovetail.attention.backend import ForwardContext
from dovetail.config.model import ModelConfig


class CausalLM(Protocol):
    """A causal language model: a ``torch.nn.Module`` with these two halves.

    The halves are apart because most steps need logits for few of their tokens.
    """

    config: ModelConfig

    def hidden(self, ctx: ForwardContext) -> Tensor:
        """Return the hidden states of the step's tokens after the final norm, [T, M]."""
        ...

    def logits(self, hidden_NM: Tensor) -> Tensor:
        """Return the logits of some rows of hidden states, float32 [N, V]."""
        ...
