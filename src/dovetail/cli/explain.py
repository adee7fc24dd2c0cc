"""``dovetail config explain``: every decided value, and who decided it.

Owns the presentation; the values and reasons are those of ``config.resolve``, so what is shown is
what an engine with the same flags would run with. No weights are read, so a pool that is sized by
what they leave of a GPU is not known yet.
"""

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from dovetail.cli.loading import load
from dovetail.cli.options import engine_options
from dovetail.config.gpu import has_nvidia_driver
from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineConfig

_ELSEWHERE = ("model", "reasons")  # fields of a config that have a place of their own


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    gpu = load("dovetail.exec.gpu").find_gpu() if has_nvidia_driver() else None
    config = resolve(options_from(engine_options(args)), gpu)
    values = decisions(config)
    console = Console(highlight=False)
    if not args.json:
        console.print(_decision_table(values))
    # It loads torch, for which nobody should wait to see what has been decided.
    found = load("dovetail.cli.facts")
    facts, means = found.model_facts(config), found.device_means(config)
    optional = [asdict(backend) for backend in found.optional_means(config)]
    if args.json:
        said = {"config": values, "model": facts, "device": means, "optional_backends": optional}
        print(json.dumps(said, indent=2))
        return 0
    console.print(_fact_table(facts, is_least_pool=config.memory_fraction is not None))
    console.print(_means_table(means))
    console.print(_optional_table(optional))
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


def _fact_table(facts: dict[str, Any], *, is_least_pool: bool) -> Table:
    table = Table("fact", "is", "note", title="model", title_justify="left")
    for name, value in facts.items():
        notes = [_FACT_NOTES.get(name, "")]
        if is_least_pool and name.startswith("kv_pool_"):
            notes.append("at least; decided when the engine starts")
        table.add_row(name, _shown(name, value), "; ".join(note for note in notes if note))
    return table


def _means_table(means: list[dict[str, str]]) -> Table:
    table = Table("operation", "by", "because", title="device", title_justify="left")
    for row in means:
        table.add_row(row["what"], row["by"], row["reason"])
    return table


def _optional_table(optional: list[dict[str, Any]]) -> Table:
    table = Table("backend", title="optional backends", title_justify="left")
    for title in ("operation", "installed", "chosen", "because"):
        table.add_column(title)
    for row in optional:
        flags = ("yes" if row[name] else "no" for name in ("is_installed", "is_chosen"))
        table.add_row(row["name"], row["operations"], *flags, row["reason"])
    return table


def _shown(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value)
    if name.endswith("_bytes") and value >= 2**20:
        return f"{value:,} ({value / 2**20:,.1f} MiB)"
    return f"{value:,}"
