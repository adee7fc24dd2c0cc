"""Benchmarks are run as modules of one folder, and take one another from there."""

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
FILES = sorted(FOLDER.glob("*.py"))


def names_of(tree: ast.Module) -> list[str]:
    """The modules that a file imports, anywhere in it."""
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_benchmark_can_be_run_as_a_module(path: Path) -> None:
    """``python -m benchmarks.x`` has no other benchmark at the top of its path, nor has a child."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    siblings = {other.stem for other in FILES}
    assert not siblings & {name.partition(".")[0] for name in names_of(tree)}
    spawned = [
        item.id
        for node in ast.walk(tree)
        if isinstance(node, ast.List)
        for item in node.elts
        if isinstance(item, ast.Name)
    ]
    assert "__file__" not in spawned, "start it by -m: a file does not find the others"
