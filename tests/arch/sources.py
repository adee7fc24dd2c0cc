"""The package's source files, parsed once for the tests of this folder."""

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "dovetail"


@dataclass(frozen=True)
class Source:
    """One module of the package: its file, its dotted name, its syntax tree."""

    path: Path

    @property
    def name(self) -> str:
        parts = list(self.path.relative_to(SRC).with_suffix("").parts)
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
        return f"{self.path.relative_to(SRC)}:{line}"


def sources(package: Path = PACKAGE) -> list[Source]:
    """Every module of the package, sorted by file name."""
    return [Source(path) for path in sorted(package.rglob("*.py"))]
