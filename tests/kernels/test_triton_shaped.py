"""All stages of a shaped draw on slots and tokens of the device, against the sampler of the CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.exec.cuda import shaped as shaped_module
from dovetail.exec.cuda.shaped import ShapedDraws
from dovetail.exec.cuda.step import SlotTensors, StepTensors
from dovetail.kernels.triton.backend import TritonKernels
from dovetail.kernels.triton.tiles import TileTable
from dovetail.sampling.sampler import History, draw
from dovetail.sampling.state import SLOT_COLUMNS, SamplingState
from dovetail.sched.plan import TokenTable
from tests.support.gpu import DEVICE, ON_GPU_TOO, randn
from tests.support.harness import make_config

# Where a GPU gives NaN or infinity without a word, the interpreter's numpy warns.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), *ON_GPU_TOO]

VOCAB, PAGE_SIZE, PROMPT_LEN = 270, 4, 9
NEUTRAL: dict[str, Any] = {
    "temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 77, "sample_index": 0,
    "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "logprob_kind": 0, "prompt_len": PROMPT_LEN, "num_biases": 0,
}  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": -0.2, "temperature": 0.0},
    {"repetition_penalty": 0.6, "presence_penalty": 1.1, "top_k": 20, "logprob_kind": 2},
    {"num_biases": 4, "top_p": 0.9},
    {"num_biases": 3, "repetition_penalty": 1.7, "frequency_penalty": -0.3, "min_p": 0.1},
    {"repetition_penalty": 1.3, "num_biases": 4, "logprob_kind": 1, "sample_index": 3},
]
BIASES = [(4, 8.0, 99), (9, -np.inf, 99), (200, -2.5, 99), (17, -np.inf, 12)]
"""Token, what is added, and until which position; the last one for some rows no more."""

LENGTHS = [10, 30, 13, 25, 11, 40, 12]


class Step:
    """One decode row in each of some slots, on the device and on the host."""

    def __init__(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        config = make_config(folder, max_running=len(rows) + 1, page_size=PAGE_SIZE)
        self.slots, count = SlotTensors(config, DEVICE), len(rows)
        self.inputs = StepTensors(config, DEVICE, tile_tokens=16, sink=0)
        self.state = SamplingState(count + 1, device=torch.device("cpu"))
        self.slot_of_row = np.roll(np.arange(count), 2)  # no row is its slot
        rng = np.random.default_rng(0)
        self.tokens = [rng.integers(0, 60, n).tolist() for n in LENGTHS[:count]]
        self.tokens_C = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
        pages = iter(rng.permutation(1024))
        for row, fields in enumerate(rows):
            self._place(row, NEUTRAL | fields, pages)
        self.inputs.rows_5R[4, :count] = 1

    def _place(self, row: int, fields: dict[str, Any], pages: Iterator[int]) -> None:
        slot, tokens = int(self.slot_of_row[row]), self.tokens[row]
        for name, value in fields.items():
            self.state.columns[name][slot] = value
            if name != "seed":
                is_float = SLOT_COLUMNS[name].dtype == torch.float32
                self.slots.param(name)[slot] = float(value) if is_float else int(value)
        for entry, (token, value, until) in enumerate(BIASES):
            self.slots.bias_ids_SJ[slot, entry] = token
            self.slots.bias_values_SJ[slot, entry] = value
            self.slots.bias_until_SJ[slot, entry] = until
            one = np.ones(1, dtype=np.int32)
            self.state.write_tokens(
                table=one * TokenTable.BIAS, slot=one * slot, index=one * entry,
                token_id=one * token, value=one * np.float32(value), until=one * until,
            )  # fmt: skip
        self.slots.page_table_SB[slot] = -1
        for begin in range(0, len(tokens), PAGE_SIZE):
            page = int(next(pages))
            self.slots.page_table_SB[slot, begin // PAGE_SIZE] = page
            for offset, token in enumerate(tokens[begin : begin + PAGE_SIZE]):
                self.tokens_C[page * PAGE_SIZE + offset] = token
        self.inputs.rows_5R[0, row] = slot
        self.inputs.end_R[row] = len(tokens)
        self.inputs.temperature_R[row] = fields["temperature"]
        self.inputs.seed_R[row] = fields["seed"]
        self.inputs.sample_index_R[row] = fields["sample_index"]

    def history(self, rows: np.ndarray) -> History:
        """See ``sampling.sampler.ReadHistory``."""
        lens = [len(self.tokens[row]) for row in rows]
        return History(
            row_S=torch.from_numpy(np.repeat(rows, lens)),
            token_S=torch.tensor([token for row in rows for token in self.tokens[row]]),
            is_output_S=torch.tensor([i >= PROMPT_LEN for n in lens for i in range(n)]),
        )

    def shaped_draws(self) -> ShapedDraws:
        return ShapedDraws(
            self.slots, self.inputs, tokens_C=self.tokens_C, page_size=PAGE_SIZE,
            kernels=TritonKernels(TileTable(2)), vocab_size=VOCAB,
        )  # fmt: skip


@pytest.mark.parametrize(("block", "programs"), [(1024, 16), (32, 2), (16, 16)])
def test_every_stage_is_that_of_the_cpu(
    block: int, programs: int, tiny_moe_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has needs of its own; what is drawn from is equal to the last bit.

    However many programs share a row, in one turn or in several.
    """
    monkeypatch.setattr(shaped_module, "_BLOCK", block)
    monkeypatch.setattr(shaped_module, "_ROW_PROGRAMS", programs)
    step, logits = Step(tiny_moe_folder, ROWS), randn(len(ROWS), VOCAB, seed=2) * 3
    shaped = step.shaped_draws()
    drawn = shaped.draw(logits)
    ours = shaped.spread(logits, drawn)
    wanted = draw(
        step.state, logits.cpu(), slots_N=step.slot_of_row,
        positions_N=np.array(LENGTHS), read_history=step.history,
    )  # fmt: skip
    assert wanted.outside_NV is not None and ours.outside_NV is not None
    assert torch.equal(ours.scaled_NV.cpu(), wanted.scaled_NV)
    assert torch.equal(ours.reported_NV.cpu(), wanted.reported_NV)
    assert torch.equal(ours.outside_NV.cpu(), wanted.outside_NV)
    assert ours.ids_N.tolist() == wanted.ids_N.tolist()
    assert ours.status_N.tolist() == [0] * len(ROWS)
    torch.testing.assert_close(ours.logprobs_N.cpu(), wanted.logprobs_N, rtol=0, atol=1e-5)


def test_a_row_that_samples_nothing_has_no_settings(tiny_moe_folder: Path) -> None:
    """A chunk of a prompt, or padding whose slot is somebody's: nothing of it is worked out."""
    step, logits = Step(tiny_moe_folder, ROWS), randn(len(ROWS), VOCAB, seed=2)
    step.inputs.rows_5R[4] = 0
    shaped = step.shaped_draws()
    ours = shaped.spread(logits, shaped.draw(logits))
    assert ours.outside_NV is not None and not ours.outside_NV.any()
    divisor = torch.where(step.inputs.temperature_R == 0, 1.0, step.inputs.temperature_R)
    assert torch.equal(ours.scaled_NV, logits / divisor[: len(ROWS), None])
    assert torch.equal(ours.reported_NV, ours.scaled_NV)


def test_a_row_whose_last_token_was_forbidden_says_so(tiny_moe_folder: Path) -> None:
    """By biases, not by the model."""
    step = Step(tiny_moe_folder, [{"num_biases": 4, "top_p": 0.9}, {"num_biases": 4}, {}])
    logits = torch.full((3, VOCAB), -torch.inf, device=DEVICE)
    logits[:, 9] = 1.0
    assert step.shaped_draws().draw(logits).status_N.tolist() == [2, 2, 0]
