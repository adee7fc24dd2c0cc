"""What a step reports beside its tokens: logprobs of prompts, alternatives, sampling masks.

Owns how they are read off hidden states and draws and written to the payload block. Runs as work of
the compute lane, on any device. Must not know where states and draws come from.

Shape legend: R rows, T tokens, P positions, B positions of a block, M model dim, V vocabulary,
J asked ids, K likeliest ids.
"""

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
from dovetail.sampling.state import SamplingState
from dovetail.sched.plan import LogprobKindId

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
    """Writes the scores of steps; one for each executor. ``params`` says how each slot samples."""

    def __init__(self, model: CausalLM, params: SamplingState) -> None:
        self._model = model
        self._params = params

    def write(self, step: ScoredStep, layout: PayloadLayout, payload: Payload) -> tuple[int, ...]:
        """Write all scores of a step.

        Returns:
            The rows whose draw has a support that is larger than the mask that was asked for.
        """
        num_scored, too_large = 0, []
        for slices in layout.scores:
            score, slot = slices.score, int(step.slot_R[slices.score.row])
            ids_J = self._params.report_ids(slot, score.num_ids).to(step.hidden_TM.device)
            if not score.is_prompt:
                if not self._write_draw(step, slices, payload, slot, ids_J):
                    too_large.append(score.row)
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
        return tuple(too_large)

    def _write_draw(
        self, step: ScoredStep, slices: ScoreSlices, payload: Payload, slot: int, ids_J: Tensor
    ) -> bool:
        """Write what is asked for of a sampled token; False if its support is too large."""
        draws, index = step.draws, int(step.draw_of_row_R[slices.score.row])
        assert draws is not None
        logits_1V, total_1 = draws.reported_NV[index, None], draws.log_total_N[index, None]
        _write_alternatives(slices, payload, 0, logits_1V, total_1, ids_J)
        if not slices.score.max_mask:
            return True
        is_greedy = self._params.columns["temperature"][slot] == 0
        support = support_of(draws, index, is_greedy=bool(is_greedy))
        return _write_mask(slices, payload, support)

    def _prompt_divisor(self, slot: int) -> float:
        """Return what the slot's logits are divided by when its prompt is scored."""
        columns = self._params.columns
        is_scaled = columns["logprob_kind"][slot] == LogprobKindId.SCALED
        return float(columns["temperature"][slot] or 1.0) if is_scaled else 1.0

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


def _write_mask(slices: ScoreSlices, payload: Payload, support: Support) -> bool:
    """Write the support of a draw; False if it has too many ids."""
    num_ids = len(support.ids_S)
    if num_ids > slices.score.max_mask:
        payload.put(slices.mask, torch.zeros(1, dtype=torch.int32))
        return False
    logprob_bits = int(np.float32(support.logprob).view(np.int32))
    payload.put(slices.mask, torch.tensor([num_ids, logprob_bits], dtype=torch.int32))
    payload.put(slices.mask, support.ids_S, at=MASK_HEAD_WORDS)
    return True


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
