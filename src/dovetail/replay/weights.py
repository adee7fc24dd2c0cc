# pyright: strict
"""Importance weights between the trainer's and the rollout's logprobs.

Owns pure functions. Weights are constants of a loss: they carry no gradient. Both kinds compare
the trainer's logprobs *before* an update with the rollout's, which would be equal if both computed
alike; they are an insurance beside a replay, not instead of one.

Shape legend: any one shape [..., T]; sequences are its rows, or what ``sequences`` says.
"""

from typing import Literal, cast

import torch
from torch import Tensor

Level = Literal["token", "sequence", "geometric"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to it before they are exponentiated."""


def truncated_weights(
    train: Tensor,
    rollout: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    level: Level = "token",
    sequences: Tensor | None = None,
) -> Tensor:
    """Return min(ratio, cap): truncated importance sampling (TIS).

    Args:
        train, rollout: log-probabilities of the same tokens, of one shape.
        mask: of that shape, what counts; weights elsewhere are 0.
        cap: largest weight.
        level: ``token``, each token's own ratio; ``sequence``, the product over its sequence;
            ``geometric``, the geometric mean over it.
        sequences: int64, of that shape, the number of each token's sequence, for packed rows;
            None: a row is a sequence.

    Returns:
        Weights of the dtype of ``train`` and its shape.

    Raises:
        ValueError: shapes differ, or ``cap`` is not above 0.
    """
    if cap <= 0:
        raise ValueError(f"cap is {cap}; give a number above 0")
    ratio = _log_ratio(train, rollout, mask, level, sequences).exp()
    # where, not a product, here and below: a ratio may be nan, or out of a half's range.
    return torch.where(mask.bool(), ratio.clamp(max=cap), 0.0)


def masked_weights(
    train: Tensor,
    rollout: Tensor,
    mask: Tensor,
    *,
    bounds: tuple[float, float] = (0.5, 2.0),
    level: Level = "token",
    veto: float | None = None,
    sequences: Tensor | None = None,
) -> Tensor:
    """Return the ratio within ``bounds`` and 0 outside: masked importance sampling (MIS).

    Args:
        train, rollout, mask, level, sequences: see ``truncated_weights``.
        bounds: smallest and largest ratio that is kept, both included. For the geometric level
            they belong close to 1, such as (0.9999, 1.0001).
        veto: a sequence with any token's own ratio below it gets weight 0; None is no veto.

    Raises:
        ValueError: shapes differ, or the bounds are not in order.
    """
    low, high = bounds
    if not 0 <= low <= high:
        raise ValueError(f"bounds are {bounds}; give (low, high) with 0 <= low <= high")
    ratio = _log_ratio(train, rollout, mask, level, sequences).exp()
    keep = mask.bool() & (ratio >= low) & (ratio <= high)
    if veto is not None:
        own = _log_ratio(train, rollout, mask, "token", sequences).exp()
        keep = keep & (_sums((own < veto) & mask.bool(), sequences) == 0)
    return torch.where(keep, ratio, 0.0)


def _log_ratio(
    train: Tensor, rollout: Tensor, mask: Tensor, level: Level, sequences: Tensor | None
) -> Tensor:
    """Return the log-ratio that counts for each token, clamped; 0 outside the mask."""
    shapes = {tuple(train.shape), tuple(rollout.shape), tuple(mask.shape)}
    if sequences is not None:
        shapes.add(tuple(sequences.shape))
    if len(shapes) > 1:
        raise ValueError(f"train, rollout, mask and sequences have different shapes: {shapes}")
    if level not in ("token", "sequence", "geometric"):
        raise ValueError(f"level is {level!r}; give token, sequence or geometric")
    # where, not a product: what is masked out may be nan.
    zero = train.new_zeros(())
    diff = torch.where(mask.bool(), train.detach() - rollout.detach().to(train.dtype), zero)
    if level == "sequence":
        diff = _sums(diff, sequences)
    elif level == "geometric":
        diff = _sums(diff, sequences) / _sums(mask.bool(), sequences).clamp(min=1)
    return diff.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sums(values: Tensor, sequences: Tensor | None) -> Tensor:
    """Return for each token the sum over its sequence."""
    values = values if values.is_floating_point() else values.float()
    if sequences is None:
        return values.sum(-1, keepdim=True).expand(values.shape)
    flat = torch.unique(sequences)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    number = torch.searchsorted(cast(Tensor, flat), sequences)
    totals = values.new_zeros(len(cast(Tensor, flat)))
    return totals.index_add(0, number.reshape(-1), values.reshape(-1))[number]
