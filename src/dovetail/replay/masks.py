# pyright: strict
"""Logprobs among the tokens that a draw could have drawn: a sampling mask, replayed.

Owns ``SamplingMask`` and the logprob under it. With truncation (top-k, top-p, min-p) the rollout
draws from q(a) = p(a) / p(S) for a in its support S. A trainer that compares with p is off by
log p(S), which compounds over tokens; one that truncates again may cut elsewhere, and the token
that was sampled can fall outside. So the support is what the sampler used, and only logits within
it get a gradient. Keep it the same for old, current and rollout logprobs; a KL against a reference
model is over the whole vocabulary.

Shape legend: R rows, one a sampled token; V vocabulary; Z ids of all rows together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """The supports of some draws, row after row (CSR).

    Attributes:
        ids_Z: int64, the ids of each row, distinct within it.
        offsets: int64 [R + 1]; row r has ``ids_Z[offsets[r] : offsets[r + 1]]``. A row without
            ids was not truncated: its support is the vocabulary.

    Raises:
        ValueError: the offsets do not ascend from 0 to the number of ids.
    """

    ids_Z: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        offsets = self.offsets
        is_whole = (
            offsets.ndim == 1
            and len(offsets) > 0
            and int(offsets[0]) == 0
            and int(offsets[-1]) == len(self.ids_Z)
            and bool((offsets[1:] >= offsets[:-1]).all())
        )
        if not is_whole:
            raise ValueError(f"offsets must ascend from 0 to {len(self.ids_Z)}, the number of ids")

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int]]) -> "SamplingMask":
        """Return the masks of an engine's reply, one list of ids a token, as one."""
        lengths = [0, *(len(row) for row in rows)]
        flat = [token for row in rows for token in row]
        return cls(
            torch.tensor(flat, dtype=torch.int64),
            torch.tensor(lengths).cumsum(0),
        )

    @property
    def num_rows(self) -> int:
        """Draws (R)."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """Ids of each row, int64 [R]; 0 is the whole vocabulary."""
        return self.offsets[1:] - self.offsets[:-1]

    def select(self, rows: Tensor) -> "SamplingMask":
        """Return the masks of other rows, int64 [any], in their order; -1 is a row without ids."""
        rows = rows.to(self.offsets.device)
        starts = self.offsets[:-1][rows.clamp(min=0)] if self.num_rows else torch.zeros_like(rows)
        lengths = self.lengths[rows.clamp(min=0)] if self.num_rows else torch.zeros_like(rows)
        lengths = lengths.masked_fill(rows < 0, 0)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        within = torch.arange(int(offsets[-1]), device=rows.device)
        at = within - offsets[:-1].repeat_interleave(lengths) + starts.repeat_interleave(lengths)
        return SamplingMask(self.ids_Z[at], offsets)

    def to(self, device: torch.device | str) -> "SamplingMask":
        """Return the same on another device."""
        return SamplingMask(self.ids_Z.to(device), self.offsets.to(device))


def masked_logprobs(
    logits_RV: Tensor, targets_R: Tensor, mask: SamplingMask, *, temperature: float = 1.0
) -> Tensor:
    """Return the logprob of each target among its support, float32 [R], differentiable.

    Args:
        logits_RV: any floating dtype; computed in float32.
        targets_R: int64, the sampled tokens.
        mask: of these rows.
        temperature: that the rollout sampled at, above 0.

    Raises:
        ValueError: numbers of rows differ, an id is not in the vocabulary, or a target is outside
            of its support, which no draw can be.
    """
    if logits_RV.ndim != 2 or targets_R.ndim != 1:
        raise ValueError(
            f"logits of shape {list(logits_RV.shape)}, targets of {list(targets_R.shape)}; give "
            "[rows, vocabulary] and [rows]: flatten a batch"
        )
    num_rows, vocab_size = logits_RV.shape
    if mask.num_rows != num_rows or len(targets_R) != num_rows:
        raise ValueError(
            f"{num_rows} rows of logits, {len(targets_R)} targets, a mask of {mask.num_rows}"
        )
    if len(mask.ids_Z):
        for end in mask.ids_Z.aminmax():
            if not 0 <= int(end) < vocab_size:
                raise ValueError(f"the mask has id {int(end)}; {vocab_size} logits")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; a greedy draw has a support of one token")
    lengths = mask.lengths
    row_Z = torch.arange(num_rows, device=lengths.device).repeat_interleave(lengths)
    _expect_targets(targets_R, mask, row_Z)
    logprob_R = _support_logprobs(logits_RV, targets_R, mask.ids_Z, row_Z, temperature)
    is_open_R = lengths == 0
    if bool(is_open_R.any()):
        rows = torch.nonzero(is_open_R).view(-1)
        whole = (logits_RV[rows].float() / temperature).log_softmax(-1)
        whole = whole.gather(1, targets_R[rows, None])[:, 0]
        logprob_R = logprob_R.index_copy(0, rows, whole)
    return logprob_R


def _support_logprobs(
    logits_RV: Tensor, targets_R: Tensor, ids_Z: Tensor, row_Z: Tensor, temperature: float
) -> Tensor:
    """Return the logprob of each target among the ids of its row; of rows without ids anything."""
    scaled_Z = logits_RV[row_Z, ids_Z].float() / temperature
    target_R = logits_RV.gather(1, targets_R[:, None])[:, 0].float() / temperature
    # A target is within its row, so the peak is the row's; it goes first, for the digits' sake.
    peak_R = target_R.detach().scatter_reduce(0, row_Z, scaled_Z.detach(), "amax")
    sum_R = torch.zeros_like(peak_R).index_add(0, row_Z, (scaled_Z - peak_R[row_Z]).exp())
    # Without the 1 the gradient of a row that is not used would be nan on its way to nowhere.
    has_ids_R = torch.zeros_like(sum_R, dtype=torch.bool).index_fill(0, row_Z, True)
    return (target_R - peak_R) - torch.where(has_ids_R, sum_R, 1.0).log()


def _expect_targets(targets_R: Tensor, mask: SamplingMask, row_Z: Tensor) -> None:
    found_R = torch.zeros_like(targets_R).index_add(
        0, row_Z, (mask.ids_Z == targets_R[row_Z]).long()
    )
    outside = (found_R == 0) & (mask.lengths > 0)
    if bool(outside.any()):
        row = int(torch.nonzero(outside)[0])
        raise ValueError(
            f"the token of row {row}, {int(targets_R[row])}, is not in its support: "
            "the mask is of another draw"
        )
