"""``dovetail config explain``: every decided value, and who decided it.

Owns the presentation; the values and reasons are those of ``config.resolve``, so what is shown is
what an engine with the same flags would run with. No weights are read.
"""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from dovetail.cli.loading import load
from dovetail.cli.options import engine_options
from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineConfig

_ELSEWHERE = ("model", "reasons")  # fields of a config that have a place of their own


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    config = resolve(options_from(engine_options(args)))
    values = decisions(config)
    console = Console(highlight=False)
    if not args.json:
        console.print(_decision_table(values))
    # It loads torch, for which nobody should wait to see what has been decided.
    facts = load("dovetail.cli.facts").model_facts(config)
    if args.json:
        print(json.dumps({"config": values, "model": facts}, indent=2))
    else:
        console.print(_fact_table(facts))
    return 0


def decisions(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """Return field -> its value and the reason for it."""
    return {
        name: {"value": getattr(config, name), "reason": config.reasons[name]}
        for name in config.__struct_fields__
        if name not in _ELSEWHERE
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
