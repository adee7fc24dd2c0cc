"""Flags that several commands share, and what they become.

Owns the spelling of flags. Defaults are those of the structs that the flags fill.
"""

import argparse
from typing import Any, get_args

from dovetail.config.schema import (
    DeviceChoice,
    EngineOptions,
    LoadFormat,
    MoeBackendChoice,
    PolicyName,
)
from dovetail.wire.request import LogprobKind, SamplingParams

PLOT_INSTALL = "pip install matplotlib pillow"
# A flag that is not given leaves no trace, so defaults live in one place.
_UNSET = argparse.SUPPRESS


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``EngineOptions``."""
    group = parser.add_argument_group("engine", "each has a default that works; see docs/config.md")
    group.add_argument(
        "--model", default=_UNSET, metavar="FOLDER|NAME",
        help="a Hugging Face model folder, or a name on the hub such as Qwen/Qwen3-0.6B "
        "(default: the embedded tiny MoE)",
    )  # fmt: skip
    group.add_argument(
        "--dtype", default=_UNSET, choices=["auto", "float32", "bfloat16"],
        help="of weights, activations and KV (default: auto)",
    )  # fmt: skip
    _add_device_flags(group)
    group.add_argument(
        "--depth", default=_UNSET, type=int, metavar="N",
        help="steps in flight while the next is planned: 0 synchronous, 1 overlap (default: 1)",
    )  # fmt: skip
    _add_pool_flags(group)
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
        help="most sequences that run at once (default: 128; GPU: up to 512)",
    )  # fmt: skip
    group.add_argument(
        "--max-queued", default=_UNSET, type=int, metavar="N",
        help="most sequences that wait beside them when served (default: 4096)",
    )  # fmt: skip
    group.add_argument(
        "--chunk-size", default=_UNSET, type=int, metavar="TOKENS",
        help="most prompt tokens forwarded in a step, -1 for no limit (default: 512; GPU: 8192)",
    )  # fmt: skip
    group.add_argument(
        "--policy", default=_UNSET, choices=get_args(PolicyName),
        help="who of the waiting starts first (default: fcfs)",
    )  # fmt: skip
    group.add_argument(
        "--no-prefix-cache", dest="prefix_cache", default=_UNSET, action="store_false",
        help="do not share computed prefixes between requests",
    )  # fmt: skip
    _add_capture_flags(group)
    group.add_argument(
        "--num-threads", default=_UNSET, type=int, metavar="N",
        help="threads inside an operation (default: 1 for a narrow model, else one a core)",
    )  # fmt: skip


def _add_pool_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--kv-memory", default=_UNSET, metavar="SIZE",
        help="memory of the KV pool, such as 512MiB or 2GB (default: 512MiB; on a GPU, see "
        "--memory-fraction)",
    )  # fmt: skip
    group.add_argument(
        "--memory-fraction", default=_UNSET, type=float, metavar="SHARE",
        help="how full the GPU may get: the KV pool is what weights and the largest step leave of "
        "that share (default: 0.9, unless the pool's size is given)",
    )  # fmt: skip
    group.add_argument(
        "--num-pages", default=_UNSET, type=int, metavar="N",
        help="the KV pool in pages; wins over --kv-memory",
    )  # fmt: skip


def _add_device_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--device", default=_UNSET, choices=get_args(DeviceChoice),
        help="where the model runs; cuda is one NVIDIA GPU, auto takes it if it is there and runs "
        "this model (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--load-format", default=_UNSET, choices=get_args(LoadFormat),
        help="dummy: random weights, for a model folder that has a config.json alone "
        "(default: safetensors)",
    )  # fmt: skip
    group.add_argument(
        "--no-graphs", dest="graphs", default=_UNSET, action="store_false",
        help="on a GPU, launch each kernel of a step by itself",
    )  # fmt: skip
    group.add_argument(
        "--moe-backend", default=_UNSET, choices=get_args(MoeBackendChoice),
        help="who computes the experts; auto is triton on a GPU, torch on a CPU (default: auto)",
    )  # fmt: skip


def _add_capture_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--enable-return-routed-experts", dest="capture", default=_UNSET, action="append_const",
        const="experts", help="the same as --capture experts",
    )  # fmt: skip
    group.add_argument(
        "--capture", default=_UNSET, action="extend", type=_names, metavar="COLUMN[,COLUMN]",
        help="keep per-token columns for requests to ask for: experts, expert_weights "
        "(default: none)",
    )  # fmt: skip


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``SamplingParams``."""
    group = parser.add_argument_group("sampling", "for --prompts: what a line leaves open")
    group.add_argument(
        "--max-new-tokens", default=_UNSET, type=int, metavar="N",
        help="most tokens to generate (default: 128, less near the end of the context)",
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
    _add_penalty_flags(group)
    group.add_argument(
        "--min-new-tokens", default=_UNSET, type=int, metavar="N",
        help="no end-of-sequence or stop token before N tokens (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--n", default=_UNSET, type=int, metavar="N",
        help="generations of each prompt; with --json or --prompts (default: 1)",
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


def _add_penalty_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--repetition-penalty", default=_UNSET, type=float, metavar="F",
        help="divide the logits of tokens that occurred, above 1 against repetition (default: 1.0)",
    )  # fmt: skip
    group.add_argument(
        "--frequency-penalty", default=_UNSET, type=float, metavar="X",
        help="subtract X from a logit for each time its token was generated (default: 0.0)",
    )  # fmt: skip
    group.add_argument(
        "--presence-penalty", default=_UNSET, type=float, metavar="X",
        help="subtract X from the logits of tokens that were generated (default: 0.0)",
    )  # fmt: skip
    group.add_argument(
        "--logit-bias", default=_UNSET, action="append", type=_bias, metavar="ID=VALUE",
        help="add VALUE to the token's logit; may be given several times",
    )  # fmt: skip


def add_logprob_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that fill the logprob fields of a ``/generate`` body."""
    group = parser.add_argument_group("logprobs", "with --json and --prompts; see docs/sampling.md")
    group.add_argument(
        "--top-logprobs-num", default=_UNSET, type=int, metavar="K",
        help="report the K likeliest ids of each position (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--logprob-start-len", default=_UNSET, type=int, metavar="POS",
        help="report prompt tokens from this position on, -1 for none (default: -1)",
    )  # fmt: skip
    group.add_argument(
        "--token-id-logprob", dest="token_ids_logprob", default=_UNSET, action="append",
        type=int, metavar="ID", help="report this id at each position; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--logprob-kind", default=_UNSET, choices=get_args(LogprobKind),
        help="of which distribution (default: scaled)",
    )  # fmt: skip


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options that were given."""
    names = EngineOptions.__struct_fields__
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` that were given."""
    fields = {
        name: getattr(args, name)
        for name in SamplingParams.__struct_fields__
        if hasattr(args, name)
    }
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(fields["logit_bias"])
    return fields


def logprob_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the logprob fields of a ``/generate`` body that were given."""
    names = ("top_logprobs_num", "logprob_start_len", "token_ids_logprob", "logprob_kind")
    fields = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if "token_ids_logprob" in fields:
        fields["token_ids_logprob"] = list(fields["token_ids_logprob"])
    return fields


def reply_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a ``/generate`` body that were given: what a reply should hold.

    What the engine is told to capture is handed back: a command has no other use for it.
    """
    return logprob_fields(args) | ({"capture": args.capture} if hasattr(args, "capture") else {})


def positive(text: str) -> int:
    """Read a number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def positive_list(text: str) -> list[int]:
    """Read numbers of at least 1, separated by commas."""
    return [positive(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, such as 42=-1.5") from None
