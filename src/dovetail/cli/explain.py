"""``dovetail config explain``: every decided value, and who decided it.

Owns the presentation; the values and reasons are those of ``config.resolve``, so what is shown is
what an engine with the same flags would run with. No weights are read.
"""

import argparse
import json
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dovetail.cli.options import add_engine_flags, engine_options
from dovetail.config.resolve import BYTES_PER_ELEMENT, kv_page_bytes, options_from, resolve
from dovetail.config.schema import EngineConfig
from dovetail.dist.comm import LocalComm
from dovetail.models.registry import build_model

_ELSEWHERE = ("model", "reasons")  # fields of a config that have a place of their own


def add_config_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("config", help="show what an engine would be configured to")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    explain = actions.add_parser(
        "explain",
        help="print each decided value and who decided it",
        description="Print what an engine with these flags would run with, and why.",
    )
    explain.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(explain)
    explain.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    config = resolve(options_from(engine_options(args)))
    values, facts = decisions(config), model_facts(config)
    if args.json:
        print(json.dumps({"config": values, "model": facts}, indent=2))
        return 0
    console = Console(highlight=False)
    console.print(_decision_table(values))
    console.print(_fact_table(facts))
    return 0


def decisions(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """Return field -> its value and the reason for it."""
    return {
        name: {"value": getattr(config, name), "reason": config.reasons[name]}
        for name in config.__struct_fields__
        if name not in _ELSEWHERE
    }


def model_facts(config: EngineConfig) -> dict[str, Any]:
    """Return what the model is and what it costs. Counts are of elements, sizes of bytes."""
    model, moe = config.model, config.model.moe
    skeleton = build_model(
        model, dtype=getattr(torch, config.dtype), device="meta", comm=LocalComm()
    )
    num_params = sum(parameter.numel() for parameter in skeleton.parameters())
    num_expert_params = sum(
        parameter.numel() for name, parameter in skeleton.named_parameters() if ".experts." in name
    )
    num_idle = 0
    if moe is not None:
        num_idle = (
            num_expert_params // moe.num_experts * (moe.num_experts - moe.num_experts_per_tok)
        )
    pool_tokens = config.num_pages * config.page_size
    kv_token_bytes = kv_page_bytes(model, dtype=config.dtype, page_size=1, capture=config.capture)
    return {
        "architecture": model.architecture,
        "num_layers": model.num_layers,
        "num_moe_layers": 0 if moe is None else len(moe.layer_ids),
        "num_experts": 0 if moe is None else moe.num_experts,
        "num_experts_per_tok": 0 if moe is None else moe.num_experts_per_tok,
        "hidden_size": model.hidden_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "sliding_window": model.sliding_window,
        "eos_token_ids": list(model.eos_token_ids),
        "num_params": num_params,
        "num_params_per_token": num_params - num_idle,
        "weight_bytes": num_params * BYTES_PER_ELEMENT[config.dtype],
        "kv_token_bytes": kv_token_bytes,
        "kv_pool_bytes": kv_token_bytes * pool_tokens,
        "kv_pool_tokens": pool_tokens,
        "kv_pool_contexts": round(pool_tokens / config.context_len, 2),
    }


_FACT_NOTES = {
    "num_params_per_token": "parameters that one token uses",
    "weight_bytes": "in memory, in the engine's dtype",
    "kv_token_bytes": "keys and values of all layers, and the token's id",
    "kv_pool_contexts": "sequences of context_len tokens that the pool holds",
}


def _decision_table(values: dict[str, dict[str, Any]]) -> Table:
    table = Table("value", title="configuration", title_justify="left")
    table.add_column("is", overflow="fold")
    table.add_column("decided by")
    for name, decision in values.items():
        table.add_row(name, _shown(name, decision["value"]), decision["reason"])
    return table


def _fact_table(facts: dict[str, Any]) -> Table:
    table = Table("fact", "is", "note", title="model", title_justify="left")
    for name, value in facts.items():
        table.add_row(name, _shown(name, value), _FACT_NOTES.get(name, ""))
    return table


def _shown(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value)
    if name.endswith("_bytes") and value >= 2**20:
        return f"{value:,} ({value / 2**20:,.1f} MiB)"
    return f"{value:,}"
