"""The step's inputs and the slots' state on the GPU, all at fixed addresses.

Owns the memory, and nothing else: ``exec.cuda.unpack`` fills it and ``exec.cuda.pack`` empties it.
Engine state: changed on the compute lane only.

Shape legend: R rows, T tokens, N query tiles, S slots, B pages of a sequence, C columns of sampling
parameters, J entries of a token table.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dovetail.config.schema import EngineConfig
from dovetail.kernels.backend import PlainDraws
from dovetail.sampling.state import SLOT_COLUMNS
from dovetail.sched.plan import FROM_DEVICE, MAX_BIASES, MAX_REPORTED_IDS, ROW_FIELDS, StepPlan

WORD_COLUMNS = tuple(name for name in SLOT_COLUMNS if name != "seed")
"""The sampling parameters that are one word wide, in the order in which a packet has them."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that launching a step depends on; the host knows it from the plan.

    Attributes:
        num_rows, num_tokens: forwarded, padding included.
        num_decode: entries of the decode list.
        num_tiles: entries of the list of prompt chunks.
    """

    num_rows: int
    num_tokens: int
    num_decode: int
    num_tiles: int


def step_shape(plan: StepPlan, *, tile_tokens: int) -> StepShape:
    """Return the shape of a plan, without padding."""
    if not len(plan.token_ids):  # decode rows alone: one token each
        return StepShape(len(plan.rows), len(plan.rows), len(plan.rows), 0)
    width, is_decode = plan.rows.width, plan.rows.start == FROM_DEVICE
    num_tiles = int((-(-width[~is_decode] // tile_tokens)).sum())
    return StepShape(len(plan.rows), int(width.sum()), int(np.sum(is_decode)), num_tiles)


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a forward leaves.

    Attributes:
        hidden_TM: of each token.
        logits_RV: float32, of each row's last token.
        is_spoilt_T: bool, tokens whose hidden states are not finite.
        draws: a plain draw for each row.
    """

    hidden_TM: Tensor
    logits_RV: Tensor
    is_spoilt_T: Tensor
    draws: PlainDraws


class SlotTensors:
    """What the device knows of each slot between steps.

    Attributes:
        kv_len: int32 [S], cached tokens.
        last_token: int32 [S], sampled last; -1 before the first.
        page_table_SB: int32; -1 where a tenant has no page.
        seed: int64 [S].
        words_CS: int32, the bits of the other sampling parameters, in the order of
            ``WORD_COLUMNS``.
        bias_ids_SJ, bias_until_SJ: int32, bias_values_SJ: float32; see ``sched.plan.TokenWrites``.
        report_ids_SJ: int32.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_slots = config.max_running
        self.kv_len = zeros(num_slots)
        self.last_token = zeros(num_slots)
        self.page_table_SB = zeros(num_slots, config.max_pages_per_sequence).fill_(-1)
        self.seed = zeros(num_slots, dtype=torch.int64)
        self.words_CS = zeros(len(WORD_COLUMNS), num_slots)
        self.bias_ids_SJ = zeros(num_slots, MAX_BIASES)
        self.bias_values_SJ = zeros(num_slots, MAX_BIASES, dtype=torch.float32)
        self.bias_until_SJ = zeros(num_slots, MAX_BIASES)
        self.report_ids_SJ = zeros(num_slots, MAX_REPORTED_IDS)

    def param(self, name: str) -> Tensor:
        """Return a sampling parameter of all slots, float32 or int32 [S], as a view."""
        words_S = self.words_CS[WORD_COLUMNS.index(name)]
        is_float = SLOT_COLUMNS[name].dtype == torch.float32
        return words_S.view(torch.float32) if is_float else words_S

    def report_ids(self, slot: int, num_ids: int) -> Tensor:
        """Return the ids whose logprobs the slot's request asks for, int64 [J]."""
        return self.report_ids_SJ[slot, :num_ids].long()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, for declaring them as engine state."""
        return tuple(vars(self).values())


class StepTensors:
    """What a forward and a draw read.

    Attributes:
        rows_5R: int32, the fields of ``sched.plan.Rows``, kept because a steady step does not send
            them again.
        num_decode: int32 [1].
        begin_R, first_R, first_tile_R: int32; cached tokens before the step, index of the row's
            first token and first tile. One entry more than rows: that of padding.
        end_R: int64, cached tokens after the step: the position of what is sampled.
        last_R: int64, index of the row's last token.
        status_R: int32, 0, or ``BROKEN_ROW`` for a row without a page for its last token.
        temperature_R, seed_R, sample_index_R: of the row's slot.
        token_ids_T, positions_T, kv_slots_T: int64; padding has token 0, position 0, the sink.
        places_T: int32, 0, 1, 2, ...
        targets_T: int64, see ``StepPlan.targets``.
        decode_R4, tiles_N4: int32, see ``kernels.backend.QueryTiles``.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, *, tile_tokens: int, sink: int
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows, tokens = config.max_running, config.max_step_tokens
        self.rows_5R = zeros(len(ROW_FIELDS), rows)
        self.num_decode = zeros(1)
        self.begin_R, self.first_R, self.first_tile_R = (zeros(rows + 1) for _ in range(3))
        self.end_R = zeros(rows, dtype=torch.int64)
        self.last_R = zeros(rows, dtype=torch.int64)
        self.status_R = zeros(rows)
        self.temperature_R = zeros(rows, dtype=torch.float32)
        self.seed_R = zeros(rows, dtype=torch.int64)
        self.sample_index_R = zeros(rows, dtype=torch.int64)
        self.token_ids_T = zeros(tokens, dtype=torch.int64)
        self.positions_T = zeros(tokens, dtype=torch.int64)
        self.kv_slots_T = zeros(tokens, dtype=torch.int64).fill_(sink)
        self.places_T = torch.arange(tokens, dtype=torch.int32, device=device)
        self.targets_T = zeros(tokens, dtype=torch.int64)
        self.decode_R4 = zeros(rows, 4)
        self.tiles_N4 = zeros(rows + -(-tokens // tile_tokens), 4)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, for declaring them as engine state."""
        return tuple(vars(self).values())
