"""The gated activation of Llama-like MLPs (SwiGLU, Shazeer, arXiv 2002.05202) in plain torch."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """See ``kernels.api.silu_mul``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
