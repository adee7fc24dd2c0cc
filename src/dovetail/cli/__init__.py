"""The command line: ``dovetail generate | serve | bench | config explain | doctor | trace |
mismatch``."""

import sys

from dovetail.cli.loading import load

EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code; an interrupt has one too, whenever it comes."""
    try:
        return load("dovetail.cli.commands").run(argv)
    except KeyboardInterrupt:
        print("\ndovetail: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
