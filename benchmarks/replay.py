"""What replay costs a trainer: a step (forward, loss, backward) with it and without, in turn.

    python -m benchmarks.replay [--device cuda] [--rounds N] [--output FILE.jsonl]

Random models: one as narrow as the toy of the examples, where what replay adds in Python is largest
beside the arithmetic, and a wider one; on a GPU one more, of layers like those of Qwen3-30B-A3B in
bfloat16. With the experts of transformers that loop (eager) or the grouped ones; activations
checkpointed in one line a device. The rows are the model's own, so that both steps compute the
same.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.common import describe_run
from benchmarks.gpu_rates import gpu_facts
from dovetail.replay.packing import RouteBatch
from dovetail.replay.session import ReplaySession


class Shape(NamedTuple):
    """A model and its batch."""

    width: int
    expert_width: int
    num_layers: int
    num_experts: int
    num_selected: int
    num_heads: int
    num_kv_heads: int
    batch: int
    length: int
    dtype: str = "float32"


SHAPES = {
    "narrow": Shape(64, 32, 10, 64, 2, 4, 2, batch=64, length=16),
    "wide": Shape(512, 256, 4, 32, 4, 4, 2, batch=4, length=128),
    "large": Shape(2048, 768, 4, 128, 8, 32, 4, batch=4, length=1024, dtype="bfloat16"),
}
CASES = {
    "cpu": [
        ("narrow", "grouped_mm", False),
        ("narrow", "eager", False),
        ("wide", "grouped_mm", False),
        ("wide", "grouped_mm", True),
    ],
    "cuda": [
        ("narrow", "grouped_mm", False),
        ("wide", "grouped_mm", False),
        ("large", "grouped_mm", False),
        ("large", "grouped_mm", True),
    ],
}
VOCAB = 256


def main() -> None:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser(description="What replay costs a trainer.")
    parser.add_argument("--device", choices=CASES, default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = gpu_facts() if args.device == "cuda" else None
    run = describe_run(sys.argv, "transformers", gpu=facts)
    lines = [
        json.dumps({**measure(*case, args.rounds, args.device), **run})
        for case in CASES[args.device]
    ]
    print("\n".join(lines))
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n")


def measure(
    name: str, experts: str, checkpointed: bool, rounds: int, device: str
) -> dict[str, Any]:
    """Return the line of one model: steps with and without replay, in turn; medians of pairs."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=shape.width,
        moe_intermediate_size=shape.expert_width,
        num_hidden_layers=shape.num_layers,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_selected,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
    )
    with torch.device(device):  # random weights by the device itself: a CPU takes minutes for them
        model = Qwen3MoeForCausalLM(config).to(getattr(torch, shape.dtype)).train()
    model.set_experts_implementation(experts)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    session = ReplaySession(model)
    input_ids = torch.randint(0, VOCAB, (shape.batch, shape.length), device=device)
    with torch.no_grad(), session.record() as recording:
        model(input_ids=input_ids, use_cache=False)
    routes = recording.routes
    found: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
    for turn in range(rounds + 1):
        for kind in ("off", "on") if turn % 2 else ("on", "off"):
            value = step(model, input_ids, session, routes if kind == "on" else None)
            if turn:
                found[kind].append(value)
    wall, cpu = (
        [(on[clock], off[clock]) for on, off in zip(found["on"], found["off"], strict=True)]
        for clock in (0, 1)
    )
    return {
        "work": f"trainer step with replay, {experts} experts"
        + (", checkpointed" if checkpointed else ""),
        "shape": f"{shape.num_layers} layers, width {shape.width}, {shape.num_selected} of "
        f"{shape.num_experts} experts of {shape.expert_width}, {shape.batch} x {shape.length} "
        f"tokens, {shape.dtype}",
        "batch": shape.batch,
        "value": round(1e3 * statistics.median(on for on, _ in wall), 2),
        "unit": "ms",
        "floor": round(1e3 * statistics.median(off for _, off in wall), 2),
        "ratio": round(statistics.median(on / off for on, off in wall), 4),
        "cpu_ratio": round(statistics.median(on / off for on, off in cpu), 4),
        "rounds": rounds,
    }


def step(
    model: nn.Module, input_ids: Tensor, session: ReplaySession, routes: RouteBatch | None
) -> tuple[float, float]:
    """Run one step to the device's end; return its seconds, of the wall and of the processor."""
    model.zero_grad()
    wait(input_ids.device)
    started, cpu_started = time.perf_counter(), time.process_time()
    if routes is None:
        backward(model, input_ids)
    else:
        with session.replay(routes):
            backward(model, input_ids)
    wait(input_ids.device)
    return time.perf_counter() - started, time.process_time() - cpu_started


def wait(device: torch.device) -> None:
    """Wait for what is queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def backward(model: nn.Module, input_ids: Tensor) -> None:
    """Compute the loss of the next tokens and its gradients."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    labels = input_ids.roll(-1, 1)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()


if __name__ == "__main__":
    main()
