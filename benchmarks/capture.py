"""What capture costs on the CPU.

    python -m benchmarks.capture [--rounds N] [--long-len N] [--output FILE.jsonl]

1. Tokens a second, and CPU time a token, of the embedded model with capture off, on, and on with
   rows returned, in turn.
2. Bytes a token of each form of the rows, and the time to encode those of a long sequence.
3. The packing of a step's rows (256 tokens x 40 layers x 8, with locations) beside their copy.
4. The time between tokens of eight streams while a long request ends, whose rows are returned or
   not: a random model of 8 layers and 48 experts a token, so that a row takes 384 bytes.
5. From a generation's end to an array in another process: see ``capture_transport.py``.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

import dovetail
from benchmarks.capture_transport import transport
from benchmarks.common import describe_run
from dovetail.config.hub import locate_model
from dovetail.core.routes import json_of, own_rows, sglang_rows
from dovetail.replay.records import RouteTrace

NUM_REQUESTS, NUM_TOKENS = 64, 64
ENCODED = (32_768, 48, 8, 128)
"""Rows, MoE layers, experts a token, experts: of Qwen3-30B-A3B."""
NUM_BYSTANDERS = 8
NUM_STARTING = 6
LAST_TOKENS = 48
"""Tokens that the long request generates: steady decoding, then its end."""

Line = dict[str, Any]
Found = TypeVar("Found")


def main() -> None:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser(description="What capture costs on the CPU.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long-len", type=int, default=32_768, help="tokens of the long prompt")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    logging.disable_progress_bar()
    lines = [
        *throughput(args.rounds),
        *payload(),
        *snapshot(),
        *bystanders(args.long_len, args.rounds),
        *transport(args.rounds),
    ]
    run = describe_run(sys.argv, "transformers")
    text = "\n".join(json.dumps({"floor": None, **line, **run}) for line in lines)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


def throughput(rounds: int) -> list[Line]:
    """Return tokens a second without capture, with it, and with rows returned."""
    columns = ("experts",)
    with dovetail.Engine() as plain, dovetail.Engine(capture=columns) as capturing:
        kinds: dict[str, Callable[[], tuple[float, float]]] = {
            "off": lambda: rates(plain, ()),
            "on": lambda: rates(capturing, ()),
            "on, returned": lambda: rates(capturing, columns),
        }
        values = interleaved(kinds, rounds)
    shape = f"{NUM_REQUESTS} requests, 32 prompt tokens, {NUM_TOKENS} generated"
    return [
        {
            "work": f"generate, capture {kind}",
            "shape": shape,
            "batch": NUM_REQUESTS,
            "value": round(statistics.median(rate for rate, _ in found), 1),
            "unit": "tokens/s",
            "ratio_to_off": ratio(found, values["off"], 0),
            "cpu_ms_a_token": round(statistics.median(cpu for _, cpu in found), 4),
            "cpu_ratio_to_off": ratio(found, values["off"], 1),
        }
        for kind, found in values.items()
    ]


def ratio(found: list[tuple[float, float]], off: list[tuple[float, float]], column: int) -> float:
    """Return the median over the rounds of one number divided by that of the engine without."""
    pairs = zip(found, off, strict=True)
    return round(statistics.median(mine[column] / its[column] for mine, its in pairs), 4)


def rates(engine: dovetail.Engine, columns: tuple[str, ...]) -> tuple[float, float]:
    """Generate for all requests; return tokens a second and CPU milliseconds a token."""
    prompts = [[(i * 7 + j) % 900 + 3 for j in range(32)] for i in range(NUM_REQUESTS)]
    params = dovetail.SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    started, cpu_started = time.perf_counter(), time.process_time()
    engine.generate(prompts, params, capture=columns)
    num_tokens, cpu_s = NUM_REQUESTS * NUM_TOKENS, time.process_time() - cpu_started
    return num_tokens / (time.perf_counter() - started), 1e3 * cpu_s / num_tokens


def interleaved(kinds: Mapping[str, Callable[[], Found]], rounds: int) -> dict[str, list[Found]]:
    """Measure all kinds in turn, after a round that does not count."""
    found: dict[str, list[Found]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name, measure in kinds.items():
            value = measure()
            if turn:
                found[name].append(value)
    return found


def payload() -> list[Line]:
    """Return bytes a token and the time to encode, for each form."""
    num_rows, num_layers, k, num_experts = ENCODED
    rng = np.random.default_rng(0)
    ids = rng.integers(0, num_experts, (num_rows, num_layers, k), dtype=np.uint8)
    token_ids = list(range(num_rows + 1))
    trace = RouteTrace.of_tokens(
        ids, token_ids, layer_ids=range(num_layers), num_experts=num_experts
    )
    columns = {"experts": trace.ids}
    forms: dict[str, Callable[[], bytes]] = {
        "SGLang's, in JSON": lambda: b"".join(
            json_of(sglang_rows(trace, num_layers=num_layers, total_len=num_rows + 1))
        ),
        "our own, in JSON": lambda: msgspec.json.encode(own_rows(columns, start=0)),
        "our own, in msgpack": lambda: msgspec.msgpack.encode(own_rows(columns, start=0)),
    }
    return [
        {
            "work": f"encode expert rows, {name}",
            "shape": f"{num_rows} rows x {num_layers} layers x {k}",
            "batch": 1,
            "value": round(1e3 * min(seconds(encode) for _ in range(5)), 2),
            "unit": "ms",
            "bytes_a_token": round(len(encode()) / num_rows, 1),
        }
        for name, encode in forms.items()
    ]


def snapshot() -> list[Line]:
    """Return what packing a step's rows costs beside copying them out."""
    rows = np.random.default_rng(0).integers(0, 128, (512, 40, 8)).astype(np.int32)
    slots, num_tokens = np.arange(256), 256
    num_bytes = rows[:num_tokens].nbytes + slots.nbytes
    device, host = torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes).byte()
    block = device.numpy()

    def pack() -> None:
        block[: -slots.nbytes].view(np.int32).reshape(num_tokens, 40, 8)[...] = rows[:num_tokens]
        block[-slots.nbytes :].view(np.int64)[...] = slots

    works: dict[str, Callable[[], object]] = {
        "pack a step's rows": pack,
        "copy a step's rows out": lambda: host.copy_(device),
    }
    return [
        {
            "work": name,
            "shape": f"256 tokens x 40 layers x 8, int32, and locations: {num_bytes} bytes",
            "batch": 256,
            "value": round(1e3 * statistics.median(seconds(work) for _ in range(200)), 4),
            "unit": "ms",
        }
        for name, work in works.items()
    ]


def bystanders(long_len: int, rounds: int) -> list[Line]:
    """Return the time between tokens of others while a long request ends."""
    with tempfile.TemporaryDirectory() as name:
        folder = long_model(Path(name), long_len + 1024)
        num_pages = (long_len + 40_000) // 16
        with dovetail.Engine(folder, capture=("experts",), num_pages=num_pages) as engine:
            kinds: dict[str, Callable[[], tuple[list[float], float]]] = {
                "not returned": lambda: gaps_at_end(engine, long_len, ()),
                "returned": lambda: gaps_at_end(engine, long_len, ("experts",)),
            }
            found = interleaved(kinds, rounds)  # the first round computes the prompt, others hit it
    return [
        {
            "work": f"time between tokens of 8 streams while a long request ends, rows {kind}",
            "shape": f"{long_len} prompt tokens; 8 layers x 48 experts a token, 384 bytes a row",
            "batch": NUM_BYSTANDERS + 1,
            "value": quantile_ms([longest for _, longest in values], 0.5),
            "unit": "ms, longest at the end, median of rounds",
            "longest_at_end_ms": [round(1e3 * longest, 2) for _, longest in values],
            "median_ms": quantile_ms([gap for gaps, _ in values for gap in gaps], 0.5),
            "p99_ms": quantile_ms([gap for gaps, _ in values for gap in gaps], 0.99),
            "num_gaps": sum(len(gaps) for gaps, _ in values),
        }
        for kind, values in found.items()
    ]


def quantile_ms(values_s: list[float], q: float) -> float:
    """Return a quantile of seconds, in milliseconds."""
    return round(1e3 * float(np.quantile(values_s, q)), 2)


def gaps_at_end(
    engine: dovetail.Engine, long_len: int, columns: tuple[str, ...]
) -> tuple[list[float], float]:
    """Return the gaps of all streams from the long request's first token to after its end.

    And the longest of them that overlaps the end: from its last token but one to its last event.
    Median over the streams: what held up one of them alone was not the engine.
    """
    ended = threading.Event()
    moments: list[list[float]] = [[] for _ in range(NUM_BYSTANDERS)]
    endless = dovetail.SamplingParams(max_new_tokens=900, temperature=0, ignore_eos=True)

    def watch(index: int) -> None:
        num_after = 0
        for _ in engine.stream([index + 5, 9, 11], endless):
            moments[index].append(time.perf_counter())
            num_after += ended.is_set()
            if num_after > 2 * LAST_TOKENS:
                return

    # First the long prompt, alone; the others start when it begins to generate.
    params = dovetail.SamplingParams(max_new_tokens=LAST_TOKENS, temperature=0, ignore_eos=True)
    prompt = [i % 900 + 3 for i in range(long_len)]
    threads = [threading.Thread(target=watch, args=(index,)) for index in range(NUM_BYSTANDERS)]
    long_moments: list[tuple[float, int]] = []
    num_tokens = 0
    for event in engine.stream(prompt, params, capture=columns):
        num_tokens += len(event.token_ids)
        long_moments.append((time.perf_counter(), num_tokens))
        if len(long_moments) == 1:
            for thread in threads:
                thread.start()
        assert event.finish_reason is None or event.routes is not None or not columns
    ended.set()
    for thread in threads:
        thread.join()
    begin = max(moment for moment, known in long_moments if known < LAST_TOKENS)
    end, _ = long_moments[-1]
    longest = [
        max(after - before for before, after in pairwise(times) if before < end and after > begin)
        for times in moments
    ]
    # The first gaps of a stream are those of its own start, and of the others'.
    gaps = [float(gap) for times in moments for gap in np.diff(times)[NUM_STARTING:]]
    return gaps, statistics.median(longest)


def long_model(folder: Path, context_len: int) -> Path:
    """Write a random model with wide rows and a long context."""
    embedded, _ = locate_model(None)
    vocab_size = msgspec.json.decode((embedded / "config.json").read_bytes())["vocab_size"]
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=64,
        num_experts_per_tok=48,
        moe_intermediate_size=8,
        max_position_embeddings=context_len,
        tie_word_embeddings=True,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, folder / name)
    return folder


def seconds(run: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
