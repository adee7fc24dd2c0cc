"""Draws one token a row from logits: the fixed order of everything that shapes a draw.

1. penalties over the tokens so far: repetition, then frequency, then presence
2. biases: ``logit_bias``, and -inf for ids that ``min_new_tokens`` holds back
3. temperature
4. truncation: top-k, top-p, min-p
5. Gumbel noise and argmax

Owns that order. Rows of a batch differ in every parameter; stages that no row asks for
cost nothing, and a row's draw does not depend on which stages the others ask for.

Shape legend: N rows that sample, V vocabulary, S tokens so far of all rows together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.kernels import api
from dovetail.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class History:
    """The tokens so far of some rows.

    Attributes:
        row_S: int64, index among the rows that sample.
        token_S: int64.
        is_output_S: bool, generated rather than prompt.
    """

    row_S: Tensor
    token_S: Tensor
    is_output_S: Tensor


ReadHistory = Callable[[NDArray[np.int64]], History]
"""From indices among the sampling rows to their tokens so far."""


def draw(
    state: SamplingState,
    logits_NV: Tensor,
    *,
    slots_N: NDArray[np.int64],
    positions_N: NDArray[np.int64],
    read_history: ReadHistory,
) -> api.Draws:
    """Draw one token for each slot; see ``kernels.api.sample``.

    Args:
        state: parameters by slot, on the host.
        logits_NV: float32, on any device.
        slots_N: whose parameters apply.
        positions_N: the index each drawn token will have in its sequence.
        read_history: called for rows with penalties only.
    """
    params, device = state.gather(slots_N), logits_NV.device

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    processed_NV = logits_NV
    penalised = np.flatnonzero(
        (params["repetition_penalty"] != 1.0)
        | (params["frequency_penalty"] != 0.0)
        | (params["presence_penalty"] != 0.0)
    )
    if len(penalised):
        history = read_history(penalised)
        processed_NV = api.penalize(
            processed_NV,
            row_S=history.row_S,
            token_S=history.token_S,
            is_output_S=history.is_output_S,
            repetition_N=tensor(params["repetition_penalty"]),
            frequency_N=tensor(params["frequency_penalty"]),
            presence_N=tensor(params["presence_penalty"]),
        )
    biases = state.biases(slots_N, positions_N)
    if biases is not None:
        processed_NV = api.add_bias(
            processed_NV,
            row_B=biases.row_B.to(device),
            token_B=biases.token_B.to(device),
            value_B=biases.value_B.to(device),
        )
    if not params["temperature"].any() and not params["logprob_kind"].any():
        return api.sample_greedy(processed_NV)
    return api.sample(
        processed_NV,
        raw_NV=logits_NV,
        position_N=tensor(positions_N),
        **{
            f"{name}_N": tensor(params[name])
            for name in (
                "temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "logprob_kind",
            )
        },
    )  # fmt: skip
