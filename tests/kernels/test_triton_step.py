"""A step unpacked, run and packed on the device gives what the CPU's own runner gives.

On a CPU Triton's interpreter runs the kernels of the step, and plain torch the model's.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.config.schema import EngineConfig
from dovetail.errors import InvariantError
from dovetail.exec.cuda.graphs import Tiers, decode_tiers, token_tiers
from dovetail.exec.cuda.profile import rehearsed_sizes
from dovetail.exec.cuda.runner import CudaRunner
from dovetail.exec.cuda.shaped import ShapedDraws
from dovetail.exec.cuda.step import Forwarded, SlotTensors, StepShape, StepTensors
from dovetail.exec.device import CpuDevice, TransferBlock
from dovetail.exec.executor import Executor
from dovetail.exec.ring import BlockRing
from dovetail.kernels.ref.backend import RefKernels
from dovetail.kernels.triton.backend import TritonKernels
from dovetail.kernels.triton.tiles import TileTable
from dovetail.sched.builder import PlanBuilder
from dovetail.sched.plan import LogprobKindId
from dovetail.sched.sequence import Sequence
from dovetail.wire.request import LogprobParams
from dovetail.wire.validate import MAX_MASK_IDS
from tests.support.gpu import DEVICE, ints, randn
from tests.support.harness import Harness, load_model, make_config
from tests.support.packets import renumber_packet

COLUMNS = ("experts", "expert_weights")
OPTIONS = {
    "page_size": 4,
    "num_pages": 33,
    "context_len": 128,
    "chunk_size": 8,
    "max_running": 5,
    "capture": COLUMNS,
}
REQUESTS = [
    (range(3, 24), {"max_new_tokens": 6, "temperature": 0.0}),
    ((5, 6, 7), {"max_new_tokens": 9, "temperature": 0.9, "sampling_seed": 2**64 - 3}),
    ((5, 6, 7, 8), {"max_new_tokens": 9, "sampling_seed": 3, "top_k": 5, "top_p": 0.9}),
    (
        (5, 6, 7, 8),
        {
            "max_new_tokens": 9,
            "sampling_seed": 4,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.2,
            "logit_bias": {7: -5.0},
            "logprobs": LogprobParams(
                logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=(5,)
            ),
        },
    ),
    ([9] * 13, {"max_new_tokens": 12, "sampling_seed": 5}),
    (range(3, 24), {"max_new_tokens": 3, "sampling_seed": 6}),  # a prefix hit
]
SHAPED = [
    (
        (5, 6, 7, 8),
        {
            "max_new_tokens": 7,
            "sampling_seed": 3,
            "top_k": 5,
            "top_p": 0.9,
            "logprobs": LogprobParams(kind="truncated", sampling_mask=True, top_logprobs_num=3),
        },
    ),
    (
        [5, 6] * 9,
        {"max_new_tokens": 6, "sampling_seed": 9, "frequency_penalty": 0.7, "min_p": 0.02},
    ),
    (
        (5, 6, 7),
        {
            "max_new_tokens": 6,
            "temperature": 0.0,
            "top_k": 4,
            "repetition_penalty": 3.0,
            "logprobs": LogprobParams(sampling_mask=True, token_ids_logprob=(5, 7)),
        },
    ),
    (
        (8, 9),
        {
            "max_new_tokens": 6,
            "sampling_seed": 8,
            "min_new_tokens": 4,
            "stop_token_ids": tuple(range(64)),
            "logprobs": LogprobParams(sampling_mask=True),  # nothing is cut off
        },
    ),
    (  # more tokens are left than a mask may have
        (8, 9, 10),
        {
            "max_new_tokens": 6,
            "temperature": 100.0,
            "sampling_seed": 8,
            "min_p": 1e-6,
            "top_k": MAX_MASK_IDS + 1,
            "logprobs": LogprobParams(sampling_mask=True),
        },
    ),
    (  # as many as it may have
        (3, 4),
        {
            "max_new_tokens": 5,
            "sampling_seed": 1,
            "top_k": MAX_MASK_IDS,
            "logprobs": LogprobParams(kind="raw", sampling_mask=True),
        },
    ),
]


class RunAnew:
    """Graphs that record nothing: a step is padded as for a graph, and then run."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self.padded = tiers.padded
        self.runner: CudaRunner | None = None
        self.seen: set[StepShape] = set()
        self.not_held: set[StepShape] = set()

    def replay(self, padded: StepShape) -> Forwarded | None:
        assert self.runner is not None
        if padded not in self._tiers.shapes:
            self.not_held.add(padded)
            return None
        self.seen.add(padded)
        return self.runner.step(padded)


def make_executor(folder: Path, make_graphs: Callable[[EngineConfig], RunAnew] | None = None):
    def make(config: EngineConfig) -> Executor:
        device, model = CpuDevice(), load_model(folder, config.dtype)
        graphs = make_graphs and make_graphs(config)
        runner = CudaRunner(config, model, device, RefKernels(), graphs)
        if graphs:
            graphs.runner = runner
        return Executor(config, runner, device)

    return make


def outputs_of(folder: Path, depth: int, requests=REQUESTS, **options: object) -> dict:
    harness = Harness(folder, depth=depth, **OPTIONS, **options)
    for prompt, fields in requests:
        harness.add(list(prompt), capture=COLUMNS, **fields)
    for _ in range(4):
        harness.step()
    harness.scheduler.retract_last()
    harness.run()
    return harness.outputs


def check_it_gives_what_the_cpu_gives(folder: Path, depth: int, make) -> None:
    wanted = outputs_of(folder, depth)
    ours = outputs_of(folder, depth, make_executor=make)
    assert wanted.keys() == ours.keys()
    for key, output in wanted.items():
        assert ours[key].token_ids == output.token_ids
        np.testing.assert_allclose(ours[key].logprobs, output.logprobs, atol=3e-5)
        for column in COLUMNS:
            rows, theirs = ours[key].captured[column], output.captured[column]
            if column == "experts":
                assert np.array_equal(rows, theirs)
            else:
                np.testing.assert_allclose(rows, theirs, atol=1e-5)


@pytest.mark.parametrize("depth", [0, 1])
def test_it_gives_what_the_cpu_gives(depth: int, tiny_moe_folder: Path) -> None:
    check_it_gives_what_the_cpu_gives(tiny_moe_folder, depth, make_executor(tiny_moe_folder))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_draw_that_is_shaped_is_that_of_the_cpu(depth: int, tiny_moe_folder: Path) -> None:
    """Penalties, biases, truncation, every kind of logprob, masks; rows with other rows' needs."""
    wanted = outputs_of(tiny_moe_folder, depth, SHAPED)
    make = make_executor(tiny_moe_folder)
    ours = outputs_of(tiny_moe_folder, depth, SHAPED, make_executor=make)
    for key, output in wanted.items():
        assert ours[key].token_ids == output.token_ids
        assert ours[key].finish == output.finish
        np.testing.assert_allclose(ours[key].logprobs, output.logprobs, atol=3e-5)
        for our_part, part in zip(ours[key].scores, output.scores, strict=True):
            assert our_part.masks == part.masks and our_part.top_ids == part.top_ids
            assert all(list(ids) == sorted(set(ids)) for ids in part.masks)
            np.testing.assert_allclose(our_part.mask_logprobs, part.mask_logprobs, atol=3e-5)
            np.testing.assert_allclose(our_part.top_logprobs, part.top_logprobs, atol=3e-5)
            np.testing.assert_allclose(our_part.id_logprobs, part.id_logprobs, atol=3e-5)
    assert [output.finish.type for output in wanted.values()].count("error") == 1
    sizes = {len(ids) for o in wanted.values() for part in o.scores for ids in part.masks}
    assert {0, 1, MAX_MASK_IDS} <= sizes


# Where a GPU gives NaN or infinity without a word, the interpreter's numpy warns.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_keeps_its_bits_whatever_its_neighbours_ask_for(tiny_moe_folder: Path) -> None:
    """Row 6 is cut, row 7 reports the model's own logits; the others draw plainly."""
    config = make_config(tiny_moe_folder, max_running=8)
    slots = SlotTensors(config, DEVICE)
    inputs = StepTensors(config, DEVICE, tile_tokens=16, sink=0)
    tokens = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    kernels = TritonKernels(TileTable(4))
    shaped = ShapedDraws(
        slots, inputs, tokens_C=tokens, page_size=16, kernels=kernels, vocab_size=2600
    )
    inputs.rows_5R[0], inputs.rows_5R[4] = ints(range(8)), 1
    inputs.temperature_R.fill_(0.7)
    inputs.seed_R.copy_(ints(range(8)))
    slots.param("repetition_penalty").fill_(1.0)
    slots.param("top_p").fill_(1.0)
    slots.param("top_k")[6] = 3
    slots.param("logprob_kind")[7] = LogprobKindId.RAW
    logits = randn(8, 2600) - 7.0
    logits[:, 7] = 0.0  # of a total near 1, the logarithm shows how it was summed up
    plain = kernels.sample_plain(
        logits,
        temperature_N=inputs.temperature_R,
        seed_N=inputs.seed_R,
        position_N=inputs.end_R,
        sample_index_N=inputs.sample_index_R,
    )
    draws = shaped.draw(logits)
    outside = shaped.spread(logits, draws).outside_NV
    assert outside is not None
    assert outside.sum(dim=1).tolist() == [0] * 6 + [2597, 0]
    for ours, theirs in zip(draws, plain, strict=True):
        assert torch.equal(ours[:6], theirs[:6])
    scaled = torch.stack([logits[6] / 0.7, logits[7]])
    chosen = scaled.log_softmax(-1).gather(1, draws.ids_N[6:, None]).view(-1)
    torch.testing.assert_close(draws.logprobs_N[6:], chosen, rtol=0, atol=1e-5)


def test_a_step_may_change_more_pages_than_there_are_programs(tiny_moe_folder: Path) -> None:
    options = {"page_size": 1, "num_pages": 300, "context_len": 256, "chunk_size": 160}
    options |= {"max_running": 2, "capture": COLUMNS}
    wanted, ours = (
        Harness(tiny_moe_folder, depth=0, **options, **more).ask(
            [3 + i % 50 for i in range(150)], max_new_tokens=2, temperature=0.0, capture=COLUMNS
        )
        for more in ({}, {"make_executor": make_executor(tiny_moe_folder)})
    )
    assert ours.token_ids == wanted.token_ids
    np.testing.assert_allclose(ours.logprobs, wanted.logprobs, atol=3e-5)
    assert np.array_equal(ours.captured["experts"], wanted.captured["experts"])


def test_padding_changes_nothing(tiny_moe_folder: Path) -> None:
    """As graphs need it: rows and tokens beyond the step, in decode steps and mixed ones."""
    made: list[RunAnew] = []

    def make_graphs(config: EngineConfig) -> RunAnew:
        tile_tokens = RefKernels().tile_tokens(3)
        made.append(RunAnew(Tiers(max_rows=5, max_tokens=13, tile_tokens=tile_tokens)))
        return made[0]

    make = make_executor(tiny_moe_folder, make_graphs)
    check_it_gives_what_the_cpu_gives(tiny_moe_folder, 1, make)
    assert {(shape.num_rows, shape.num_tokens) for shape in made[0].seen} >= {(4, 4), (5, 13)}


def test_a_step_that_no_graph_holds_is_run_by_itself(
    tiny_moe_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As prompts above the last tier are: padded, but not replayed."""
    monkeypatch.setattr("dovetail.exec.cuda.graphs._MAX_TOKENS", 6)
    monkeypatch.setattr("dovetail.exec.cuda.graphs._ROUND", 5)
    graphs = RunAnew(Tiers(max_rows=5, max_tokens=13, tile_tokens=RefKernels().tile_tokens(3)))
    make = make_executor(tiny_moe_folder, lambda config: graphs)
    check_it_gives_what_the_cpu_gives(tiny_moe_folder, 1, make)
    assert {shape.num_tokens for shape in graphs.seen} >= {4, 6}
    assert {shape.num_tokens for shape in graphs.not_held} == {10, 13}


def test_before_the_first_step_no_transfer_block_is_taken(
    tiny_moe_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are tried out, and what is recorded, find a packet without rows, number 0.

    So they need no fence; the first step takes a block, as every step does.
    """
    taken: list[BlockRing] = []
    original = BlockRing.acquire

    def acquire(ring: BlockRing) -> TransferBlock:
        taken.append(ring)
        return original(ring)

    monkeypatch.setattr(BlockRing, "acquire", acquire)
    harness = Harness(
        tiny_moe_folder, depth=0, make_executor=make_executor(tiny_moe_folder), **OPTIONS
    )
    runner = harness.executor._runner
    slots = [tensor.clone() for tensor in runner._slots.tensors]
    for num_tokens in rehearsed_sizes(harness.config):
        runner.rehearse(num_tokens)
    for shape in Tiers(max_rows=5, max_tokens=13, tile_tokens=RefKernels().tile_tokens(3)).shapes:
        runner.step(shape)
    assert not taken
    assert all(map(torch.equal, slots, runner._slots.tensors))
    assert runner._inputs.kv_slots_T.eq(runner._kv.sidecars["tokens"].sink).all()
    assert not runner.blocks.results.any() and not runner._packets.words.any()
    assert runner._kv.sidecars["experts"].rows[:-1].eq(255).all(), "a row that is not the sink"
    harness.add([5, 6, 7], max_new_tokens=4)
    harness.step()
    assert len(taken) == 2  # a packet, a result


def test_tiers_hold_every_step_they_are_asked_for() -> None:
    assert decode_tiers(1) == (1,) and decode_tiers(3) == (1, 2, 3)
    assert decode_tiers(100) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 100)
    assert token_tiers(256, 8448)[:2] == (256, 512) and token_tiers(256, 8448)[-1] == 2048
    assert token_tiers(300, 700) == (512, 700) and token_tiers(4000, 9000) == (4000,)
    tiers = Tiers(max_rows=300, max_tokens=9000, tile_tokens=16)
    for num_tokens in (1, 299, 512, 513, 2048):
        padded = tiers.padded(StepShape(2, num_tokens, 0, 9))
        assert padded in tiers.shapes and padded.num_tokens >= max(num_tokens, padded.num_rows)
    assert tiers.padded(StepShape(2, 2049, 0, 200)) == StepShape(300, 2112, 300, 432)
    assert tiers.padded(StepShape(2, 9000, 0, 200)).num_tokens == 9000
    assert tiers.padded(StepShape(299, 299, 299, 0)) == StepShape(300, 300, 300, 0)


@pytest.mark.parametrize("num_pages", [1, None])
def test_a_row_past_its_pages_is_an_error(num_pages: int | None, tiny_moe_folder: Path) -> None:
    """Past those it was told, and past any that a sequence can have."""
    harness = Harness(
        tiny_moe_folder, depth=0, make_executor=make_executor(tiny_moe_folder), **OPTIONS
    )
    harness.add([5, 6, 7], max_new_tokens=4, ignore_eos=True)
    harness.step()
    slots, page_size = harness.executor._runner._slots, harness.config.page_size
    assert slots.page_table_SB[0].ge(0).sum() == 1  # with room for one token more
    slots.kv_len[:] = (num_pages or slots.page_table_SB.shape[1]) * page_size
    with pytest.raises(InvariantError, match="past the pages reserved"):
        harness.step()


@pytest.mark.parametrize("device", ["cpu", "triton"])
def test_a_page_that_was_never_told_is_an_error(
    device: str, tiny_moe_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of a prompt of 7 tokens in pages of 4."""
    add_pages = PlanBuilder.add_pages

    def add_but_the_last(self: PlanBuilder, sequence: Sequence) -> None:
        add_pages(self, sequence)
        self._page_writes.pop()

    monkeypatch.setattr(PlanBuilder, "add_pages", add_but_the_last)
    made = {"make_executor": make_executor(tiny_moe_folder)} if device == "triton" else {}
    harness = Harness(tiny_moe_folder, depth=0, **made, **OPTIONS)
    harness.add(list(range(5, 12)), max_new_tokens=4, ignore_eos=True)
    with pytest.raises(InvariantError, match="past the pages"):
        harness.step()


def test_padding_samples_nothing(tiny_moe_folder: Path) -> None:
    """Rows that larger steps left behind are padding of smaller ones."""
    harness = Harness(
        tiny_moe_folder, depth=0, make_executor=make_executor(tiny_moe_folder), **OPTIONS
    )
    for num_tokens in (2, 3, 6):
        harness.add([5, 6, 7], max_new_tokens=num_tokens, ignore_eos=True)
    harness.run()
    assert harness.executor._runner._inputs.rows_5R[4].tolist() == [1, 0, 0, 0, 0]


def test_a_stale_handle_is_an_error(tiny_moe_folder: Path) -> None:
    harness = Harness(
        tiny_moe_folder, depth=0, make_executor=make_executor(tiny_moe_folder), **OPTIONS
    )
    harness.add([5, 6, 7], max_new_tokens=4)
    harness.step()
    tenants = harness.executor._runner._tenants
    tenants._generation += 1
    tenants._seen = None  # rows that were seen to be right are not looked at again
    with pytest.raises(InvariantError, match="stale slots"):
        harness.run()


def test_the_configuration_is_refused_where_kernels_cannot_do_it(tiny_moe_folder: Path) -> None:
    for name, value in (("page_size", 12), ("max_running", 5000), ("lanes", "threaded")):
        with pytest.raises(Exception, match=name):
            make_config(tiny_moe_folder, device="cuda", **{name: value})


@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_that_ran_on_another_packet_is_an_error(
    depth: int, tiny_moe_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the host had written into a block that was still to be read."""
    renumber_packet(monkeypatch, 4, 7)
    with pytest.raises(InvariantError, match="the step of packet 4 ran on packet 7"):
        outputs_of(tiny_moe_folder, depth, make_executor=make_executor(tiny_moe_folder))


def test_numbers_begin_again_and_nothing_changes(
    tiny_moe_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.exec.executor._ROUNDS", 2)
    check_it_gives_what_the_cpu_gives(tiny_moe_folder, 1, make_executor(tiny_moe_folder))
