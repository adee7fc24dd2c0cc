"""Mixed traffic on the GPU, replayed: every logprob, token and expert row is that of a forward.

All in float32, where differences have a reason; bfloat16 is compared by quantiles.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.device.sleepy import sleepy_gpu
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE, random_qwen3_moe
from tests.support.figures import Figure
from tests.support.gpu_engine import gpu_harness
from tests.support.handmade import fx_count, fx_tag
from tests.support.oracle import Oracle
from tests.support.traffic import (
    CROWD,
    DRAWS,
    PLAIN,
    Asked,
    check_pool_is_whole,
    check_rows,
    fill_a_page_with_nan,
    logprob_errors,
    mixed_traffic,
    num_ties,
)

pytestmark = pytest.mark.cuda

TINY_MOE_EOS = (2,)
BESIDE = "median error of a logprob"


@pytest.fixture(scope="module")
def oracle(tiny_moe_folder: Path) -> Oracle:
    return Oracle(tiny_moe_folder, experts="eager")


def prepared(asked: list[Asked], oracle: Oracle) -> list[Asked]:
    oracle.prepare([one.ids for one in asked], device="cuda")
    return asked


def spread(errors: np.ndarray) -> dict[str, float]:
    """Say how errors are distributed."""
    median, most_of = np.quantile(errors, [0.5, 0.999])
    return {"median": float(median), "p99.9": float(most_of), "tokens": len(errors)}


def check_quantiles(ours: np.ndarray, theirs: np.ndarray) -> dict[str, list[float]]:
    """Ours are at most half as much again as theirs; return both."""
    found = {}
    for quantile in (0.5, 0.9, 0.99):
        pair = [float(np.quantile(errors, quantile)) for errors in (ours, theirs)]
        found[f"p{100 * quantile:g}"] = pair
        assert pair[0] <= 1.5 * pair[1]
    return found


def test_b21_2000_mixed_requests_are_replayed(tiny_moe_folder, oracle, figure: Figure) -> None:
    """sglang #26380, #29353: tables written while the forward before still read them."""
    harness = gpu_harness(tiny_moe_folder, depth=1, **CROWD)
    asked = mixed_traffic(harness, 2000, seed=1)
    check_pool_is_whole(harness)
    harness.close()
    kinds = [one.output.finish.type for one in asked]
    assert kinds.count("abort") > 20 and kinds.count("length") > 1000
    num_retractions = sum(one.output.usage.num_retractions for one in asked)
    assert num_retractions > 100
    errors, ties = [], 0
    for start in range(0, len(asked), 250):
        part = prepared(asked[start : start + 250], oracle)
        errors.append(logprob_errors(part, oracle))
        if start < 500:
            ties += num_ties(part, oracle, eos_ids=TINY_MOE_EOS)
    found = np.concatenate(errors)
    figure(
        "2,000 mixed requests replayed", float(found.max()), "largest error of a logprob",
        shape="tiny-moe float32", batch=33, errors=spread(found), ties_in_500=ties,
        retractions=num_retractions, aborts=kinds.count("abort"),
    )  # fmt: skip
    assert len(found) > 20_000 and found.max() < 1e-4 and ties < 20


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_depth_and_graphs_change_no_token(depth, graphs, tiny_moe_folder, oracle) -> None:
    harness = gpu_harness(tiny_moe_folder, depth=depth, graphs=graphs, **CROWD)
    asked = mixed_traffic(harness, 120, seed=2, disturbed=False)
    harness.close()
    prepared(asked, oracle)
    assert logprob_errors(asked, oracle).max() < 1e-4
    assert num_ties(asked, oracle, eos_ids=TINY_MOE_EOS) < 6


@pytest.mark.parametrize("graphs", [False, True])
def test_rows_of_500_mixed_requests_are_those_of_a_forward(
    graphs, tiny_moe_folder, oracle, figure: Figure
) -> None:
    harness = gpu_harness(tiny_moe_folder, graphs=graphs, capture=("experts",), **CROWD)
    asked = mixed_traffic(harness, 500, seed=3, capture=("experts", "tokens"))
    harness.close()
    num_rows = 0
    for start in range(0, len(asked), 250):
        for one in prepared(asked[start : start + 250], oracle):
            num_rows += check_rows(one, oracle)
            tokens = one.output.captured.get("tokens", np.zeros(0, dtype=int))
            assert tokens.tolist() == one.ids[: len(tokens)]
    figure(
        "expert rows of 500 mixed requests", num_rows, "rows, each that of a forward",
        shape="tiny-moe float32, 6 layers", batch=33, graphs=graphs,
    )  # fmt: skip
    assert num_rows > 15_000


def test_b137_every_size_up_and_down_pads_without_harm(tiny_moe_folder, oracle) -> None:
    """vllm #38436, sglang #1094: padded rows with stale bindings reach real ones.

    Steps of 1, 3 and 7 rows, of every size up to one more than fit, and back, after junk has been
    in all rows; graphs hold sizes 1, 2, 4, 8 and 9 alone.
    """
    options = {"context_len": 128, "num_pages": 200, "max_running": 9, "chunk_size": 96}
    rng = np.random.default_rng(4)
    sizes = [9, 1, 3, 7, *range(1, 11), *range(10, 0, -1)]
    for graphs in (True, False):
        harness = gpu_harness(tiny_moe_folder, graphs=graphs, capture=("experts",), **options)
        asked = []
        for size in sizes:
            for _ in range(size):
                prompt = rng.integers(3, 2000, rng.integers(1, 40)).tolist()
                params = DRAWS[rng.integers(PLAIN)] | {
                    "max_new_tokens": 8, "sampling_seed": int(rng.integers(2**62))
                }  # fmt: skip
                number = harness.add(prompt, capture=("experts",), ignore_eos=True, **params)
                asked.append((prompt, params, number))
            harness.run()
        done = [Asked(prompt, params, harness.outputs[i]) for prompt, params, i in asked]
        harness.close()
        for one in prepared(done, oracle):
            check_rows(one, oracle)
        assert logprob_errors(done, oracle).max() < 1e-4
        assert num_ties(done, oracle, eos_ids=()) < 6


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_b23_each_step_runs_with_its_own_packet(seed, tmp_path_factory) -> None:
    """vllm #54269, vllm-ascend #16428: a step ran with the next one's ids, positions or pages.

    Sleeping lanes, rows that jump between 1, 33, 7 and 64, and a bias of 100 that forces each
    request to its own token at first: any other would be a neighbour's.
    """
    folder = fx_count(tmp_path_factory.mktemp("fx_count"))
    harness = gpu_harness(
        folder, device=sleepy_gpu(seed), max_running=64, context_len=64, num_pages=400,
        chunk_size=128, prefix_cache=False,
    )  # fmt: skip
    for size in (1, 33, 7, 64):
        asked = []
        for i in range(size):
            own = (31 * i + size) % VOCAB_SIZE
            prompt = [(own + j) % VOCAB_SIZE for j in range(1 + i % 11)]
            forced = {own: 100.0} if i % 3 == 0 else None
            number = harness.add(
                prompt, max_new_tokens=9, temperature=0.0, ignore_eos=True, logit_bias=forced
            )
            right = [own] * 9 if forced else [(prompt[-1] + 1 + j) % VOCAB_SIZE for j in range(9)]
            asked.append((number, right))
        harness.run()
        for number, right in asked:
            assert harness.outputs[number].token_ids == right
    harness.close()


def test_b25_pages_of_one_that_stopped_are_not_written_any_more(tmp_path_factory) -> None:
    """vllm #45357: found finished after the next step had been launched; its pages went on."""
    folder = fx_tag(tmp_path_factory.mktemp("fx_tag"))
    harness = gpu_harness(folder, depth=2, page_size=4, num_pages=24, context_len=96, max_running=4)
    rng = np.random.default_rng(1)
    for turn in range(1000):
        first, second = rng.choice(100, 2, replace=False).tolist()
        a = harness.add(
            [first, *[200] * 46], max_new_tokens=40, stop_token_ids=(first,), temperature=0.0
        )
        while not harness.outputs[a].token_ids:
            harness.step()
        b = harness.add([second, *[201 + turn % 9] * 86], max_new_tokens=8, temperature=0.0)
        outputs = harness.run()
        assert outputs[a].token_ids == [first]
        assert outputs[b].token_ids == [second] * 8, turn
    harness.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_b141_nan_stays_with_its_request(graphs, tiny_moe_folder, oracle) -> None:
    """vllm #50002: NaN of one request's cache reaches others through pages and prefixes."""
    harness = gpu_harness(
        tiny_moe_folder, graphs=graphs, context_len=128, num_pages=320, max_running=33
    )
    prompts = [[7 + i] * (20 + i) for i in range(51)]
    numbers = [
        harness.add(prompt, max_new_tokens=40, temperature=0.0, ignore_eos=True)
        for prompt in prompts
    ]
    while len(harness.outputs[numbers[3]].token_ids) < 5:
        harness.step()
    fill_a_page_with_nan(harness, numbers[3])
    harness.run()
    again = harness.ask(prompts[3], max_new_tokens=10, temperature=0.0, ignore_eos=True)
    outputs = [harness.outputs[number] for number in numbers]
    assert [o.finish.type for o in outputs] == ["length"] * 3 + ["error"] + ["length"] * 47
    assert "not finite" in outputs[3].finish.message and again.finish.type == "length"
    healthy = {"temperature": 0.0, "sampling_seed": 0}
    done = [
        Asked(prompt, healthy, output)
        for prompt, output in zip([*prompts, prompts[3]], [*outputs, again], strict=True)
        if output.finish.type == "length"
    ]
    harness.close()
    assert logprob_errors(prepared(done, oracle), oracle).max() < 1e-4
    assert num_ties(done, oracle, eos_ids=()) < 6


def test_bfloat16_is_no_further_from_float32_than_transformers(
    tiny_moe_folder, oracle, figure: Figure
) -> None:
    """Rounding moves router choices too, so single tokens jump; quantiles are compared."""
    harness = gpu_harness(tiny_moe_folder, dtype="bfloat16", **CROWD)
    asked = mixed_traffic(harness, 300, seed=5)
    harness.close()
    half = Oracle(tiny_moe_folder, dtype=torch.bfloat16, experts="eager")
    ours, theirs = (errors_beside(asked, oracle, other) for other in (None, half))
    quantiles = check_quantiles(ours, theirs)
    figure(
        "bfloat16 beside float32, 300 requests", float(np.median(ours)), BESIDE,
        shape="tiny-moe", batch=33, ours_and_transformers=quantiles,
    )  # fmt: skip
    assert np.median(ours) > 0, "these logprobs were not computed in bfloat16"


def errors_beside(asked: list[Asked], oracle: Oracle, other: Oracle | None) -> np.ndarray:
    """How far an oracle of another dtype, or the engine, is from the oracle in float32."""
    prepared(asked, oracle)
    if other is None:
        return logprob_errors(asked, oracle)
    prepared(asked, other)
    errors = []
    for one in asked:
        temperature = one.params["temperature"] or 1.0
        scores = [o.score(one.prompt, one.output.token_ids, temperature) for o in (oracle, other)]
        errors.append(np.abs(scores[0] - scores[1]) * min(temperature, 1.0))
    return np.concatenate(errors)


@pytest.fixture(scope="module")
def billion_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 0.84 billion parameters, 64 experts, 8 of them a token."""
    return random_qwen3_moe(
        tmp_path_factory.mktemp("billion"), num_layers=8, hidden_size=1024, num_heads=16,
        num_kv_heads=4, head_dim=64, num_experts=64, experts_per_token=8, expert_size=512,
        vocab_size=8192, intermediate_size=1024, device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip


def test_a_random_model_of_a_billion_parameters_follows_the_oracle(
    billion_folder, figure: Figure
) -> None:
    """In float32 token for token; in bfloat16 as near as transformers in bfloat16 is."""
    oracle = Oracle(billion_folder, experts="eager")
    options = {"context_len": 160, "max_running": 33, "chunk_size": 256, "capture": ("experts",)}
    traffic = {"seed": 6, "capture": ("experts",), "max_prompt_len": 96}
    harness = gpu_harness(billion_folder, num_pages=300, **options)
    asked = mixed_traffic(harness, 96, **traffic)
    harness.close()
    errors = logprob_errors(prepared(asked, oracle), oracle)
    assert errors.max() < 1e-3
    ties = num_ties(asked, oracle, eos_ids=(EOS_ID,), noise=1e-3, router_noise=3e-4)
    num_rows = sum(check_rows(one, oracle, noise=3e-4) for one in asked)
    assert ties < 10 and num_rows > 3000
    figure(
        "96 requests beside an oracle", float(errors.max()), "largest error of a logprob",
        shape="random 1B, 64 experts, float32", batch=33, errors=spread(errors), ties=ties,
        rows=num_rows,
    )  # fmt: skip
    harness = gpu_harness(billion_folder, num_pages=300, dtype="bfloat16", **options)
    asked = mixed_traffic(harness, 96, **traffic)
    harness.close()
    ours = errors_beside(asked, oracle, None)
    oracle.model.cpu()
    half = Oracle(billion_folder, dtype=torch.bfloat16, experts="eager")
    theirs = errors_beside(asked, oracle, half)
    figure(
        "bfloat16 beside float32, 96 requests", float(np.median(ours)), BESIDE,
        shape="random 1B, 64 experts", batch=33,
        ours_and_transformers=check_quantiles(ours, theirs),
    )  # fmt: skip
