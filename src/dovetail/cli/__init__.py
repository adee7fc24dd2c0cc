"""The command line: ``dovetail generate | bench | config explain | doctor``."""

from dovetail.cli.main import main

__all__ = ["main"]
