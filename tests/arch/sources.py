"""The Python files of the package and of the folders beside it, for the tests of this folder."""

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "dovetail"
BESIDE = ("tests", "benchmarks", "scripts")


@dataclass(frozen=True)
class Source:
    """One Python file: where it is, its dotted name below ``root``, its syntax tree."""

    path: Path
    root: Path = SRC

    @property
    def name(self) -> str:
        parts = list(self.path.relative_to(self.root).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def layer(self) -> str:
        """The first name under the package: ``cache`` for ``dovetail.cache.radix``."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(self.root)}:{line}"


def sources(package: Path = PACKAGE) -> list[Source]:
    """Every module of the package, sorted by file name."""
    return [Source(path) for path in sorted(package.rglob("*.py"))]


def sources_beside(root: Path = ROOT) -> list[Source]:
    """Every Python file of the folders ``BESIDE`` the package, sorted by folder and file name."""
    paths = [path for folder in BESIDE for path in sorted((root / folder).rglob("*"))]
    return [Source(path, root) for path in paths if is_python(path)]


def is_python(path: Path) -> bool:
    """By its suffix; a script that has none says so in its first line."""
    if path.suffix or not path.is_file():
        return path.suffix == ".py"
    with path.open("rb") as file:
        first = file.readline()
    return first.startswith(b"#!") and b"python" in first
