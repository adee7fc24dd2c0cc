"""What a step reports beside its tokens: logprobs of prompts, alternatives, sampling masks.

Owns how they are read off hidden states and draws and written to the payload block. Runs as work of
the compute lane, on any device. Must not know where states and draws come from.

Shape legend: R rows, T tokens, P positions, B positions of a block, M model dim, V vocabulary,
J asked ids, K likeliest ids.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.config.payload import MASK_HEAD_WORDS
from dovetail.exec.readback import Bytes, PayloadLayout, PayloadSlice, ScoreSlices
from dovetail.kernels import api
from dovetail.models.causal_lm import CausalLM
from dovetail.sampling.masks import Support, support_of
from dovetail.sched.plan import LogprobKindId
from dovetail.wire.validate import MAX_MASK_IDS, MAX_TOP_LOGPROBS

HEAD_BLOCK = 64
"""Rows of hidden states that become logits at once when a prompt is scored: logits of a whole
chunk would be the largest tensor of the step."""


class Payload(Protocol):
    """The payload block of a step, where the compute lane can write."""

    def put(self, item: PayloadSlice, values: Tensor, *, at: int = 0) -> None:
        """Store ``values``, converted to the array's dtype, from its element ``at`` on."""
        ...


class HostPayload:
    """A payload block in memory that numpy can write."""

    def __init__(self, block: Bytes) -> None:
        self._block = block

    def put(self, item: PayloadSlice, values: Tensor, *, at: int = 0) -> None:
        """See ``Payload``."""
        item.view(self._block)[at : at + len(values)] = values.numpy()


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """What the scores of one step are computed from.

    Attributes:
        hidden_TM: of the step's tokens.
        first_token_R: index of each row's first token within the step.
        slot_R: whose each row is.
        targets: int64, the known next tokens of all prompt scores.
        draws: of the rows that sample; None if none does.
        draw_of_row_R: index of each row's draw.
    """

    hidden_TM: Tensor
    first_token_R: NDArray[np.integer]
    slot_R: NDArray[np.integer]
    targets: Tensor
    draws: api.Draws | None
    draw_of_row_R: NDArray[np.integer]


class ScoreWriter:
    """Writes the scores of steps, and waits for nothing; one for each executor.

    Args:
        model: whose head scores prompts.
        columns: how each slot samples, on the host; see ``SamplingState``.
        report_ids: from a slot and a count to so many ids whose logprobs its request asks for,
            int64, on the device.
    """

    def __init__(
        self,
        model: CausalLM,
        columns: Mapping[str, NDArray[np.generic]],
        report_ids: Callable[[int, int], Tensor],
    ) -> None:
        self._model = model
        self._columns = columns
        self._report_ids = report_ids

    def write(
        self, step: ScoredStep, layout: PayloadLayout, payload: Payload
    ) -> list[tuple[int, Tensor]]:
        """Write all scores of a step.

        Returns:
            For each row that asked for a mask, whether the support of its draw is larger than that:
            bool [], on the device.
        """
        num_scored, masked = 0, list[tuple[int, Tensor]]()
        for slices in layout.scores:
            score, slot = slices.score, int(step.slot_R[slices.score.row])
            ids_J = self._report_ids(slot, score.num_ids)
            if not score.is_prompt:
                is_too_large = self._write_draw(step, slices, payload, slot, ids_J)
                if is_too_large is not None:
                    masked.append((score.row, is_too_large))
                continue
            first = int(step.first_token_R[score.row]) + score.first
            self._score_prompt(
                slices,
                payload,
                step.hidden_TM[first : first + score.count],
                step.targets[num_scored : num_scored + score.count],
                divisor=self._prompt_divisor(slot),
                ids_J=ids_J,
            )
            num_scored += score.count
        return masked

    def rehearse(self, hidden_TM: Tensor, draws: api.Draws) -> None:
        """Compute what a step's scores take most memory for, and drop it."""
        vocab_size = draws.scaled_NV.shape[1]
        support_of(draws, 0, is_greedy=False, max_ids=min(MAX_MASK_IDS, vocab_size))
        logits_BV = self._model.logits(hidden_TM[:HEAD_BLOCK]) / 1.0
        log_total_B = torch.logsumexp(logits_BV, dim=-1)
        api.top_logprobs(logits_BV, log_total_B, min(MAX_TOP_LOGPROBS, vocab_size))

    def _write_draw(
        self, step: ScoredStep, slices: ScoreSlices, payload: Payload, slot: int, ids_J: Tensor
    ) -> Tensor | None:
        """Write what is asked for of a sampled token; whether its mask is too large, if any."""
        draws, index = step.draws, int(step.draw_of_row_R[slices.score.row])
        assert draws is not None
        logits_1V, total_1 = draws.reported_NV[index, None], draws.log_total_N[index, None]
        _write_alternatives(slices, payload, 0, logits_1V, total_1, ids_J)
        if not slices.score.max_mask:
            return None
        is_greedy = bool(self._columns["temperature"][slot] == 0)
        support = support_of(draws, index, is_greedy=is_greedy, max_ids=slices.score.max_mask)
        return _write_mask(slices, payload, support)

    def _prompt_divisor(self, slot: int) -> float:
        """Return what the slot's logits are divided by when its prompt is scored."""
        is_scaled = self._columns["logprob_kind"][slot] == LogprobKindId.SCALED
        return float(self._columns["temperature"][slot]) or 1.0 if is_scaled else 1.0

    def _score_prompt(
        self,
        slices: ScoreSlices,
        payload: Payload,
        hidden_PM: Tensor,
        targets_P: Tensor,
        *,
        divisor: float,
        ids_J: Tensor,
    ) -> None:
        """Score known next tokens, a block of rows at a time."""
        for begin in range(0, len(targets_P), HEAD_BLOCK):
            block = slice(begin, begin + HEAD_BLOCK)
            logits_BV = self._model.logits(hidden_PM[block]) / divisor
            log_total_B = torch.logsumexp(logits_BV, dim=-1)
            chosen_B = logits_BV.gather(1, targets_P[block, None]).view(-1)
            payload.put(slices.logprobs, chosen_B - log_total_B, at=begin)
            _write_alternatives(slices, payload, begin, logits_BV, log_total_B, ids_J)


def _write_mask(slices: ScoreSlices, payload: Payload, support: Support) -> Tensor:
    """Write the support of a draw, or that it has no ids if it has too many; return which."""
    is_too_large = support.num_ids > slices.score.max_mask
    num_ids = torch.where(is_too_large, 0, support.num_ids).to(torch.int32)
    head = torch.stack((num_ids, support.logprob.view(torch.int32)))
    payload.put(slices.mask, head)
    payload.put(slices.mask, support.ids_S, at=MASK_HEAD_WORDS)
    return is_too_large


def _write_alternatives(
    slices: ScoreSlices,
    payload: Payload,
    begin: int,
    logits_BV: Tensor,
    log_total_B: Tensor,
    ids_J: Tensor,
) -> None:
    """Write the top and asked-for logprobs of a block of positions."""
    if slices.score.num_top:
        ids_BK, values_BK = api.top_logprobs(logits_BV, log_total_B, slices.score.num_top)
        payload.put(slices.top_ids, ids_BK, at=begin)
        payload.put(slices.top_logprobs, values_BK, at=begin)
    if len(ids_J):
        payload.put(slices.id_logprobs, logits_BV[:, ids_J] - log_total_B[:, None], at=begin)
