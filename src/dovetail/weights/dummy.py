"""Random weights, for measuring a shape without its checkpoint."""

import torch
from torch import nn

STANDARD_DEVIATION = 0.02


@torch.no_grad()
def fill_with_noise(model: nn.Module, *, seed: int = 0) -> None:
    """Fill every matrix with small normal noise, every vector with ones.

    Vectors are the weights of norms: with noise there, hidden states would shrink to nothing.
    """
    for index, parameter in enumerate(model.parameters()):
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        generator = torch.Generator(parameter.device).manual_seed(seed + index)
        parameter.normal_(0.0, STANDARD_DEVIATION, generator=generator)
