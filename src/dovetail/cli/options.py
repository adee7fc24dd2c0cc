"""Flags that several commands share, and what they become."""

import argparse
from typing import Any

from dovetail.wire.request import SamplingParams

_UNSET = (
    argparse.SUPPRESS
)  # a flag that is not given leaves no trace, so defaults live in one place


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``EngineOptions``."""
    group = parser.add_argument_group(
        "engine", "each has a default that works; see docs/architecture.md"
    )
    group.add_argument(
        "--model", default=_UNSET, metavar="FOLDER",
        help="a Hugging Face model folder (default: the embedded tiny MoE)",
    )  # fmt: skip
    group.add_argument(
        "--dtype", default=_UNSET, choices=["auto", "float32", "bfloat16"],
        help="of weights, activations and KV (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--depth", default=_UNSET, type=int, metavar="N",
        help="steps in flight while the next is planned: 0 synchronous, 1 overlap (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--kv-memory", default=_UNSET, metavar="SIZE",
        help="memory of the KV pool, such as 512MiB or 2GB (default: 512MiB)",
    )  # fmt: skip
    group.add_argument(
        "--num-pages", default=_UNSET, type=int, metavar="N",
        help="the KV pool in pages; wins over --kv-memory",
    )  # fmt: skip
    group.add_argument(
        "--page-size", default=_UNSET, type=int, metavar="TOKENS",
        help="tokens per KV page (default: 16)",
    )  # fmt: skip
    group.add_argument(
        "--context-len", default=_UNSET, type=int, metavar="TOKENS",
        help="most tokens of prompt and output together (default: the model's)",
    )  # fmt: skip
    group.add_argument(
        "--max-running", default=_UNSET, type=int, metavar="N",
        help="most sequences that run at once (default: 128)",
    )  # fmt: skip
    group.add_argument(
        "--chunk-size", default=_UNSET, type=int, metavar="TOKENS",
        help="most prompt tokens forwarded in a step, -1 for no limit (default: 512)",
    )  # fmt: skip
    group.add_argument(
        "--no-prefix-cache", dest="prefix_cache", default=_UNSET, action="store_false",
        help="do not share computed prefixes between requests",
    )  # fmt: skip
    group.add_argument(
        "--num-threads", default=_UNSET, type=int, metavar="N",
        help="threads inside an operation (default: 1 for a narrow model, else one a core)",
    )  # fmt: skip


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``SamplingParams``."""
    group = parser.add_argument_group("sampling", "for --prompts: what a line leaves open")
    group.add_argument(
        "--max-new-tokens", default=_UNSET, type=int, metavar="N",
        help="most tokens to generate (default: 128)",
    )  # fmt: skip
    group.add_argument(
        "--temperature", default=_UNSET, type=float, metavar="T",
        help="0 is greedy (default: 1.0)",
    )  # fmt: skip
    group.add_argument(
        "--top-k", default=_UNSET, type=int, metavar="K",
        help="draw among the K likeliest tokens, -1 for all (default: -1)",
    )  # fmt: skip
    group.add_argument(
        "--top-p", default=_UNSET, type=float, metavar="P",
        help="draw among the likeliest tokens that reach probability P (default: 1.0)",
    )  # fmt: skip
    group.add_argument(
        "--min-p", default=_UNSET, type=float, metavar="P",
        help="drop tokens less likely than P times the likeliest (default: 0.0)",
    )  # fmt: skip
    group.add_argument(
        "--seed", dest="sampling_seed", default=_UNSET, type=int, metavar="N",
        help="draw the same tokens again (default: from the operating system, and reported)",
    )  # fmt: skip
    group.add_argument(
        "--stop", default=_UNSET, action="append", metavar="TEXT",
        help="end before this text; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--stop-token-id", dest="stop_token_ids", default=_UNSET, action="append", type=int,
        metavar="ID", help="end with this token; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--ignore-eos", default=_UNSET, action="store_true",
        help="go on past the model's end-of-sequence token",
    )  # fmt: skip


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options that were given."""
    names = (
        "model", "dtype", "depth", "kv_memory", "num_pages", "page_size", "context_len",
        "max_running", "chunk_size", "prefix_cache", "num_threads",
    )  # fmt: skip
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters that were given, defaults for the rest."""
    values = {
        name: getattr(args, name)
        for name in SamplingParams.__struct_fields__
        if hasattr(args, name)
    }
    for name in ("stop", "stop_token_ids"):
        if name in values:
            values[name] = tuple(values[name])
    return SamplingParams(**values)
