"""The embedded model on this CPU: our engine against transformers, in interleaved pairs.

    python -m benchmarks.cpu_vs_transformers [--repeats 5] [--output FILE.jsonl]

Greedy, float32, one intra-op thread, no prefix reuse between repeats. Three opponents, all
transformers: ``generate`` at batch 1, its continuous batching with 32 and 128 requests at once
(pool sized as ours), and ``generate`` on a left-padded batch of the same requests. Each pair runs
ours, theirs, ours, theirs, ...; the ratio is that of the medians. One prompt takes half a second,
so there are six times as many pairs of it. Prints one JSON line a pair.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import dovetail
from benchmarks.common import describe_run

PAGE_SIZE = 16
POOL_TOKENS = 128 * 384
OUTPUT_LEN = 64

Ids = list[list[int]]


def prompts_of(batch: int, *, seed: int = 0) -> Ids:
    """Return ``batch`` prompts of 16 to 128 random ids (no special ones)."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 2048, rng.integers(16, 129)).tolist() for _ in range(batch)]


def run_ours(engine: dovetail.Engine, prompts: Ids) -> list[list[int]]:
    """Generate with our engine; returns ids."""
    params = dovetail.SamplingParams(temperature=0, max_new_tokens=OUTPUT_LEN, ignore_eos=True)
    return [list(g.token_ids) for g in engine.generate(prompts, params)]


def run_generate(model: Any, prompts: Ids) -> list[list[int]]:
    """Generate with ``generate`` on a left-padded batch; returns ids."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=OUTPUT_LEN,
            eos_token_id=-1, pad_token_id=0,
        )  # fmt: skip
    return out[:, longest:].tolist()


def run_continuous(model: Any, prompts: Ids) -> list[list[int]]:
    """Generate with transformers' continuous batching; returns ids."""
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=OUTPUT_LEN, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=POOL_TOKENS // PAGE_SIZE,
            max_batch_tokens=512 + 128,
            allow_block_sharing=False,
        ),
        warmup=False,
    )
    by_prompt = {tuple(o.prompt_ids): o.generated_tokens for o in outputs.values()}
    return [list(by_prompt[tuple(prompt)]) for prompt in prompts]


def measure(
    name: str,
    ours: Callable[[Ids], list[list[int]]],
    theirs: Callable[[Ids], list[list[int]]],
    *,
    batch: int,
    repeats: int,
    console: Console,
) -> dict[str, object]:
    """Time interleaved pairs on fresh prompts; returns the result line."""
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    same = total = 0
    for repeat in track(range(repeats + 1), description=f"{name} {batch}", console=console):
        prompts = prompts_of(batch, seed=repeat)
        outputs = {}
        for side, run in (("ours", ours), ("theirs", theirs)):
            started = time.perf_counter()
            outputs[side] = run(prompts)
            if repeat:  # the first pair warms up
                seconds[side].append(time.perf_counter() - started)
        assert all(len(ids) == OUTPUT_LEN for out in outputs.values() for ids in out)
        same += sum(a == b for a, b in zip(outputs["ours"], outputs["theirs"], strict=True))
        total += batch
    median = {side: statistics.median(values) for side, values in seconds.items()}
    tokens = batch * OUTPUT_LEN
    return {
        "work": f"tiny-moe against transformers {name}",
        "shape": "tiny-moe float32, prompts U(16, 128), 64 out",
        "batch": batch,
        "value": round(median["theirs"] / median["ours"], 3),
        "unit": "times faster (ratio of medians)",
        "floor": None,
        "their_tokens_per_second": round(tokens / median["theirs"], 1),
        "tokens_per_second": round(tokens / median["ours"], 1),
        "seconds": {side: [round(v, 4) for v in values] for side, values in seconds.items()},
        "equal_outputs": f"{same} of {total}",
    } | describe_run(sys.argv, "transformers")


def main() -> None:
    """Run all pairs."""
    parser = argparse.ArgumentParser(
        description="Our engine against transformers on this CPU, in interleaved pairs."
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    console = Console(stderr=True)
    lines = []
    with dovetail.Engine(
        page_size=PAGE_SIZE, num_pages=POOL_TOKENS // PAGE_SIZE, prefix_cache=False, num_threads=1
    ) as engine:
        folder = engine.config.model_folder
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        paged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, batch, theirs in (
            ("generate", 1, lambda prompts: run_generate(model, prompts)),
            ("continuous batching", 32, lambda prompts: run_continuous(paged, prompts)),
            ("continuous batching", 128, lambda prompts: run_continuous(paged, prompts)),
            ("padded generate", 32, lambda prompts: run_generate(model, prompts)),
            ("padded generate", 128, lambda prompts: run_generate(model, prompts)),
        ):
            line = measure(
                name, lambda prompts: run_ours(engine, prompts), theirs,
                batch=batch, repeats=args.repeats * (6 if batch == 1 else 1), console=console,
            )  # fmt: skip
            lines.append(json.dumps(line))
            print(lines[-1], flush=True)
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
