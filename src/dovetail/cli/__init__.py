"""The command line: ``dovetail generate | serve | bench | config explain | doctor | trace |
mismatch``."""

import atexit
import signal
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
    finally:
        atexit.register(_end_at_interrupt)  # the last one registered is the first one called


def _end_at_interrupt() -> None:
    """Let an interrupt end the process in silence: an exception would come out of a destructor."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
