"""Layers import only leftwards, at the top of the file, with no exception for typing."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.arch.sources import Source, sources

# fmt: off
ORDER = [
    "errors", "wire", "config", "text", "cache", "sched", "kernels", "dist", "capture",
    "attention", "layers", "sampling", "models", "weights", "spec", "exec", "core", "server",
    "fleet", "cli",
]
# fmt: on
# Layers held tighter than the order holds them.
ONLY = {"replay": {"wire"}, "kernels": {"errors"}}
# Layers beside the order, which these and what is right of them may use.
USED_FROM = {"replay": "core"}


@dataclass(frozen=True)
class Import:
    """One import of our own: what it names, where, and whether inside a function."""

    line: int
    layer: str  # "" is the package itself
    names: tuple[str, ...]
    in_function: bool


def own_imports(source: Source) -> Iterator[Import]:
    inside = {
        id(node)
        for function in ast.walk(source.tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _import(alias.name, (), node.lineno, id(node) in inside)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(source, node)
            names = tuple(alias.name for alias in node.names)
            yield from _import(module, names, node.lineno, id(node) in inside)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = source.name.split(".")
    if source.path.name != "__init__.py":
        package = package[:-1]
    base = package[: len(package) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def _import(module: str, names: tuple[str, ...], line: int, in_function: bool) -> Iterator[Import]:
    first, _, rest = module.partition(".")
    if first != "dovetail":
        return
    if rest:
        yield Import(line, rest.partition(".")[0], names, in_function)
        return
    # "from dovetail import cache" names a layer; anything else is a public name.
    layers = [name for name in names if name in (*ORDER, *ONLY)]
    for layer in layers:
        yield Import(line, layer, (), in_function)
    others = tuple(name for name in names if name not in layers)
    if others or not names:
        yield Import(line, "", others, in_function)


def faults(source: Source) -> list[str]:
    """What this module imports against the rules; empty if nothing."""
    if source.name == "dovetail":
        return []  # the package loads its public names lazily: the one exception
    if source.layer not in ORDER and source.layer not in ONLY:
        return [f"{source.at(1)}: layer '{source.layer}' has no place in the order"]
    found: list[str] = []
    for item in own_imports(source):
        if item.in_function:
            found.append(f"{source.at(item.line)}: imports our own code inside a function")
        if item.layer == "":
            if source.layer != "cli":  # the command line is a user of the public names
                found.append(f"{source.at(item.line)}: imports the package; name the module")
        elif item.layer != source.layer and item.layer not in allowed(source.layer):
            found.append(f"{source.at(item.line)}: {source.layer} must not import {item.layer}")
    return found


def allowed(layer: str) -> set[str]:
    if layer in ONLY:
        return ONLY[layer]
    place = ORDER.index(layer)
    beside = {name for name, first in USED_FROM.items() if place >= ORDER.index(first)}
    return beside | set(ORDER[:place])


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_imports_go_leftwards(source: Source) -> None:
    assert faults(source) == []


def test_the_rules_catch_what_they_forbid(tmp_path) -> None:
    def write(name: str, text: str) -> Source:
        path = tmp_path / "dovetail" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return Source(path, tmp_path)

    bad = [
        ("cache/a.py", "from dovetail.sched.plan import StepPlan"),
        ("cache/b.py", "import dovetail.exec.state"),
        ("cache/c.py", "from dovetail import sched"),
        ("cache/d.py", "from ..sched import plan"),
        ("cache/e.py", "if TYPE_CHECKING:\n    from dovetail.core.loop import Loop"),
        ("cache/f.py", "def f():\n    from dovetail.wire import request"),
        ("cache/g.py", "from dovetail import Engine"),
        ("kernels/h.py", "from dovetail.sched.plan import StepPlan"),
        ("replay/i.py", "from dovetail.config import schema"),
        ("shiny/j.py", ""),
        ("exec/o.py", "from dovetail.replay.records import RouteTrace"),
    ]
    for name, text in bad:
        assert len(faults(write(name, text))) == 1, (name, text)
    good = [
        ("cache/k.py", "from dovetail.cache.pages import PagePool\nimport numpy"),
        ("cache/l.py", "from . import pages\nfrom ..wire import request"),
        ("kernels/m.py", "from dovetail.errors import ConfigError"),
        ("core/p.py", "from dovetail.replay.records import RouteTrace"),
        ("replay/n.py", "from dovetail.wire.result import TokenEvent\nimport torch"),
        (
            "cli.py",
            "import dovetail\nfrom dovetail import Engine\nfrom dovetail.core.engine import Engine",
        ),
    ]
    for name, text in good:
        assert faults(write(name, text)) == [], (name, text)
