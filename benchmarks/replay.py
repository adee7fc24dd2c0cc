"""What replay costs a trainer: a step (forward, loss, backward) with it and without, in turn.

    python -m benchmarks.replay [--rounds N] [--output FILE.jsonl]

Two random models: one as narrow as the toy of the examples, where what replay adds in Python is
largest beside the arithmetic, and a wider one. Each with the experts of transformers that loop
(eager) and the grouped ones; activations checkpointed in one line. The rows are the model's own,
so that both steps compute the same.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.common import describe_run
from dovetail.replay.packing import RouteBatch
from dovetail.replay.session import ReplaySession

# Hidden size, expert width, layers, experts, experts a token, batch, tokens
SHAPES = {"narrow": (64, 32, 10, 64, 2, 64, 16), "wide": (512, 256, 4, 32, 4, 4, 128)}
VOCAB = 256


def main() -> None:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser(description="What replay costs a trainer.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        ("narrow", "grouped_mm", False),
        ("narrow", "eager", False),
        ("wide", "grouped_mm", False),
        ("wide", "grouped_mm", True),
    ]
    run = describe_run(sys.argv, "transformers")
    lines = [json.dumps({**measure(*case, args.rounds), **run}) for case in cases]
    print("\n".join(lines))
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n")


def measure(shape: str, experts: str, checkpointed: bool, rounds: int) -> dict[str, Any]:
    """Return the line of one model: steps with and without replay, in turn; medians of pairs."""
    width, expert_width, layers, num_experts, k, batch, length = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        moe_intermediate_size=expert_width,
        num_hidden_layers=layers,
        num_experts=num_experts,
        num_experts_per_tok=k,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen3MoeForCausalLM(config).train()
    model.set_experts_implementation(experts)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    session = ReplaySession(model)
    input_ids = torch.randint(0, VOCAB, (batch, length))
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
        "shape": f"{layers} layers, width {width}, {k} of {num_experts} experts of {expert_width}, "
        f"{batch} x {length} tokens, float32",
        "batch": batch,
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
    """Run one step; return its seconds, of the wall and of the processor."""
    model.zero_grad()
    started, cpu_started = time.perf_counter(), time.process_time()
    if routes is None:
        backward(model, input_ids)
    else:
        with session.replay(routes):
            backward(model, input_ids)
    return time.perf_counter() - started, time.process_time() - cpu_started


def backward(model: nn.Module, input_ids: Tensor) -> None:
    """Compute the loss of the next tokens and its gradients."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    labels = input_ids.roll(-1, 1)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()


if __name__ == "__main__":
    main()
