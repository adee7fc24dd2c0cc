"""Files and functions stay small, names say what things are, nothing is global.

Sizes are those of tests, benchmarks and scripts, too.
"""

import ast
import re
from collections.abc import Iterator

import pytest

import dovetail
from tests.arch.sources import Source, sources, sources_beside

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60  # of code: the docstring is not counted
VAGUE = {"manager", "base", "mixin", "helper", "utils", "util", "impl"}

every_source = pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
every_file = pytest.mark.parametrize(
    "source", [*sources(), *sources_beside()], ids=lambda source: source.name
)


def words_of(name: str) -> set[str]:
    """``KVPageHelpers`` and ``kv_page_helpers`` -> {kv, page, helper}; ``utils`` stays."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {word.lower() for word in words} | {word.lower().removesuffix("s") for word in words}


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    end = function.end_lineno or function.lineno
    lines = end - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


@every_file
def test_file_is_short(source: Source) -> None:
    assert len(source.text.splitlines()) <= MAX_FILE_LINES


@every_file
def test_functions_are_short(source: Source) -> None:
    long = {
        f"{source.at(function.lineno)} {function.name}": lines
        for function in functions(source)
        if (lines := code_lines(function)) > MAX_FUNCTION_LINES
    }
    assert long == {}


@every_source
def test_names_are_not_vague(source: Source) -> None:
    names = source.name.split(".")[1:]
    names += [node.name for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    vague = [name for name in names if words_of(name) & VAGUE]
    assert vague == []


@every_source
def test_module_says_what_it_owns(source: Source) -> None:
    assert ast.get_docstring(source.tree), f"{source.name} has no module docstring"


@every_source
def test_nothing_is_global(source: Source) -> None:
    found: list[str] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            found.append(f"{source.at(node.lineno)}: global {', '.join(node.names)}")
        if isinstance(node, ast.FunctionDef) and node.name.startswith("get_current_"):
            found.append(f"{source.at(node.lineno)}: {node.name}")
    assert found == []


def test_public_names_exist() -> None:
    for name in dovetail.__all__:
        assert getattr(dovetail, name) is not None
    assert dir(dovetail) == sorted(dovetail.__all__), "and nothing that it is made of"
    with pytest.raises(AttributeError):
        _ = dovetail.no_such_name


def test_tests_benchmarks_and_scripts_are_measured_too() -> None:
    names = {source.name for source in sources_beside()}
    assert names >= {"tests.conftest", "tests.arch.test_shape", "benchmarks.common"}
    assert names >= {"scripts.make_docs", "scripts.tiny_moe.train"}
    assert names >= {"scripts.install", "scripts.gpu-wheels"}, "which have no suffix"
    assert "scripts.check" not in names, "it is bash"


def test_vague_words_are_found_and_others_left_alone() -> None:
    for name in ("PageManager", "PoolBase", "kv_utils", "LogMixin", "helpers", "RunImpl"):
        assert words_of(name) & VAGUE, name
    for name in ("Database", "basic", "PagePool", "utility", "implied"):
        assert not words_of(name) & VAGUE, name


def test_a_docstring_does_not_make_a_function_long() -> None:
    body = "\n".join(["    x = 1"] * 60)
    tree = ast.parse(f'def f():\n    """One.\n\n    Two.\n    """\n{body}\n')
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert code_lines(function) == 61
