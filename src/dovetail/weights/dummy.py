"""Random weights, for measuring a shape without its checkpoint."""

import torch
from torch import nn

STANDARD_DEVIATION = 0.02
ATTENTION_OUT = "o_proj.weight"
ATTENTION_SHARE = 0.01
"""Of the standard deviation, for what attention adds. With random weights it is nearly the mean of
all values before a token: were it as large as the rest, tokens of a sequence would grow alike from
layer to layer, and choose the same experts."""


@torch.no_grad()
def fill_with_noise(model: nn.Module, *, seed: int = 0) -> None:
    """Fill every matrix with small normal noise, every vector with ones.

    Vectors are the weights of norms: with noise there, hidden states would shrink to nothing.
    Tokens stay apart through all layers, so routers spread them over the experts.
    """
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        share = ATTENTION_SHARE if name.endswith(ATTENTION_OUT) else 1.0
        generator = torch.Generator(parameter.device).manual_seed(seed + index)
        parameter.normal_(0.0, share * STANDARD_DEVIATION, generator=generator)
