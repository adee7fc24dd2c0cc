"""The command line: ``dovetail generate``."""

from dovetail.cli.main import main

__all__ = ["main"]
