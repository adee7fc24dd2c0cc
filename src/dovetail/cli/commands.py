"""What a command line does: parse, run the command, turn errors into messages and exit codes."""

import sys

from dovetail.cli.loading import load
from dovetail.cli.parsers import build_parser
from dovetail.errors import EngineError

EXIT_USER_ERROR = 2


def run(argv: list[str] | None) -> int:
    """Run one command and return the exit code."""
    args = build_parser().parse_args(argv)
    args.words = sys.argv[1:] if argv is None else argv
    try:
        return load(args.home).run(args)
    except EngineError as error:
        if args.debug:
            raise
        print(f"dovetail: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; say nothing more
        return 0
