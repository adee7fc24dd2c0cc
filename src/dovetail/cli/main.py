"""Entry point: parse, run a command, turn errors into messages and exit codes."""

import argparse
import sys

import dovetail
from dovetail.cli.bench import add_bench_command
from dovetail.cli.doctor import add_doctor_command
from dovetail.cli.explain import add_config_command
from dovetail.cli.generate import add_generate_command
from dovetail.cli.serve import add_serve_command
from dovetail.errors import EngineError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """Return the whole command line."""
    parser = argparse.ArgumentParser(
        prog="dovetail",
        description="An LLM rollout and serving engine whose tokens can be replayed.",
    )
    parser.add_argument("--version", action="version", version=f"dovetail {dovetail.__version__}")
    parser.add_argument(
        "--debug", action="store_true", help="show tracebacks instead of one-line errors"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate_command(commands)
    add_serve_command(commands)
    add_bench_command(commands)
    add_config_command(commands)
    add_doctor_command(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    args = build_parser().parse_args(argv)
    args.words = sys.argv[1:] if argv is None else argv
    try:
        return args.run(args)
    except EngineError as error:
        if args.debug:
            raise
        print(f"dovetail: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("\ndovetail: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; say nothing more
        return 0
