"""The whole command line, as parsers.

Owns the words of the help. Must not import what is slow: help is to be there at once. A command's
own module, its ``home``, is loaded when it runs.
"""

import argparse
from pathlib import Path

import dovetail
from dovetail.cli.options import (
    PLOT_INSTALL,
    add_engine_flags,
    add_logprob_flags,
    add_sampling_flags,
    positive,
    positive_list,
)
from dovetail.server.settings import DEFAULT_PORT

_GENERATE_EPILOG = """\
examples:
  dovetail generate "KING HENRY"                      stream text from the embedded model
  dovetail generate --chat "What is 12 + 30?"         one question through the chat template
  dovetail generate --chat                            talk; an empty line or Ctrl-D ends it
  dovetail generate --json "KING HENRY"               ids and logprobs as JSON
  dovetail generate --prompts in.jsonl -o out.jsonl   many prompts at once

a line of --prompts is the body of a /generate call; docs/server.md has its fields:
  {"text": "KING HENRY", "sampling_params": {"temperature": 0, "max_new_tokens": 20}}
  {"input_ids": [1037, 492], "rid": "my-own-label"}
  {"messages": [{"role": "user", "content": "Hello"}]}
  {"text": "KING", "logprob_start_len": 0, "top_logprobs_num": 5, "token_ids_logprob": [10]}
  {"text": ["KING", "QUEEN"], "return_routed_experts": true}
a reply has logprobs unless its line says "return_logprob": false, and with --capture experts the
experts of each token unless its line names other columns ("capture": [] for none)
"""

_SERVE_EPILOG = """\
examples:
  dovetail serve                                       the embedded model on 127.0.0.1:30000
  dovetail serve --model Qwen/Qwen3-0.6B --port 8000
  dovetail serve --host 0.0.0.0 --api-key SECRET       for other machines, with a key

then, from another shell:
  curl localhost:30000/health

  curl localhost:30000/generate -H 'Content-Type: application/json' -d '
    {"text": "KING HENRY", "sampling_params": {"max_new_tokens": 20}, "return_logprob": true}'

  curl localhost:30000/v1/chat/completions -H 'Content-Type: application/json' -d '
    {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "stream": true}'

from Python:
  openai.OpenAI(base_url="http://localhost:30000/v1", api_key="none")

Ctrl-C ends the server: open requests are answered with what they have.
docs/server.md has the routes and their fields.
"""


_MISMATCH_DESCRIPTION = """\
Print how far a trainer's logprobs are from those of the rollout that sampled the tokens, with
95 % intervals from resampled sequences, and how often their routers choose other experts.

A file compares one rollout with one or more forwards of the trainer, its arms; a usual pair is
"live", with the trainer's own routing, and "replayed". Where there are two, the ratio of the
second to the first follows: below 1, the second is closer.
"""
_MISMATCH_EPILOG = """\
Write such a file from a trainer, with one array a sequence:

  from dovetail.replay.comparison import Comparison
  Comparison.of_arrays(
      rollout, {"live": live, "replayed": replayed}, starts=prompt_lens,
      overlaps=overlaps, layer_ids=session.layer_ids, num_experts_per_tok=8,
  ).save("step-100.mismatch")

docs/replay.md says where each comes from.

  dovetail mismatch step-100.mismatch
  dovetail mismatch step-100.mismatch --plot step-100.png
  dovetail mismatch step-100.mismatch --json | jq .arms.replayed.k3
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the whole command line; ``home`` of what it parses names the command's module."""
    parser = argparse.ArgumentParser(
        prog="dovetail",
        description="An LLM rollout and serving engine whose tokens can be replayed.",
    )
    parser.add_argument("--version", action="version", version=f"dovetail {dovetail.__version__}")
    parser.add_argument(
        "--debug", action="store_true", help="show tracebacks instead of one-line errors"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_serve(commands)
    _add_bench(commands)
    _add_config(commands)
    _add_doctor(commands)
    _add_mismatch(commands)
    _add_trace(commands)
    return parser


def _add_generate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="generate text from a prompt, a chat or a file of prompts",
        description="Generate text. Streams to standard output.",
        epilog=_GENERATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text; - reads standard input"
    )
    parser.add_argument("--chat", action="store_true", help="PROMPT is a chat message; none: talk")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="one request a line")
    parser.add_argument("--json", action="store_true", help="print ids and logprobs as JSON lines")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write JSON lines here instead of standard output"
    )
    add_sampling_flags(parser)
    add_logprob_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(home="dovetail.cli.generate")


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, in the dialects of OpenAI and SGLang",
        description="Serve a model over HTTP, in the dialects of OpenAI and SGLang.",
        epilog=_SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS",
        help="address to listen on; 0.0.0.0 is every network (default: 127.0.0.1)",
    )  # fmt: skip
    group.add_argument(
        "--port", default=DEFAULT_PORT, type=int, metavar="N",
        help=f"port to listen on; 0 takes a free one (default: {DEFAULT_PORT})",
    )  # fmt: skip
    group.add_argument(
        "--api-key", metavar="KEY",
        help="clients must send it as bearer token; /health stays open (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--served-model-name", metavar="NAME",
        help="what clients call the model (default: as given with --model)",
    )  # fmt: skip
    group.add_argument(
        "--max-body-bytes", default=argparse.SUPPRESS, type=positive, metavar="N",
        help="longest request body (default: 67108864)",
    )  # fmt: skip
    group.add_argument(
        "--capture-files", type=Path, metavar="FOLDER",
        help="let clients on this machine take captured rows from files here, in memory, such as "
        "/dev/shm/dovetail; see docs/capture.md (default: none)",
    )  # fmt: skip
    add_engine_flags(parser)
    parser.set_defaults(home="dovetail.cli.serve")


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("bench", help="measure how fast the engine is here")
    works = parser.add_subparsers(dest="work", required=True, metavar="WORK")
    offline = works.add_parser("offline", help="many prompts at once: tokens per second")
    offline.add_argument("--num-prompts", type=positive, default=64, metavar="N", help="(64)")
    offline.add_argument(
        "--input-len", type=_length_range, default=(16, 128), metavar="N|LOW:HIGH",
        help="tokens of each prompt, drawn evenly (16:128)",
    )  # fmt: skip
    offline.add_argument(
        "--output-len", type=_length_range, default=(64, 64), metavar="N|LOW:HIGH",
        help="tokens generated for each prompt, drawn evenly (64)",
    )  # fmt: skip
    decode = works.add_parser("decode", help="time of one step, by batch size and context")
    decode.add_argument(
        "--batches", type=positive_list, default=[1, 8, 32], metavar="N,N", help="(1,8,32)"
    )
    decode.add_argument(
        "--contexts", type=positive_list, default=[128], metavar="TOKENS,TOKENS",
        help="context where the measured steps begin (128)",
    )  # fmt: skip
    decode.add_argument(
        "--steps", type=positive, default=16, metavar="N", help="steps that are measured (16)"
    )
    prefill = works.add_parser("prefill", help="prompt tokens per second, by prompt length")
    prefill.add_argument(
        "--input-lens", type=positive_list, default=[64, 256], metavar="TOKENS,TOKENS",
        help="(64,256)",
    )  # fmt: skip
    for parser in (offline, decode, prefill):
        if parser is not offline:
            parser.add_argument(
                "--repeats", type=positive, default=3, metavar="N",
                help="runs of which the least time counts (3)",
            )  # fmt: skip
        parser.add_argument(
            "--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (1.0)"
        )
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (0)")
        add_engine_flags(parser)
        parser.set_defaults(home="dovetail.cli.bench")


def _add_config(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("config", help="show what an engine would be configured to")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    explain = actions.add_parser(
        "explain",
        help="print each decided value and who decided it",
        description="Print what an engine with these flags would run with, and why.",
    )
    explain.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(explain)
    explain.set_defaults(home="dovetail.cli.explain")


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="check whether the engine can run here",
        description="Check this machine and environment. Exit code 0: the engine can run here.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(home="dovetail.cli.doctor")


def _add_mismatch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "mismatch",
        help="compare a trainer's logprobs and routes with the rollout's",
        description=_MISMATCH_DESCRIPTION,
        epilog=_MISMATCH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="written by Comparison.save")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png",
        help="draw the survival curve of |difference| and a heat map of layers and tokens whose "
        f"experts differ (needs matplotlib: {PLOT_INSTALL})",
    )  # fmt: skip
    parser.add_argument(
        "--sequence", type=int, metavar="N",
        help="draw the heat map of this sequence, from 0 (default: of all, averaged)",
    )  # fmt: skip
    parser.add_argument(
        "--resamples", type=positive, default=1000, metavar="N",
        help="of the sequences, for the intervals (default: 1000)",
    )  # fmt: skip
    parser.set_defaults(home="dovetail.cli.mismatch")


def _length_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    lengths = positive(low), positive(high or low)
    if lengths[0] > lengths[1]:
        raise argparse.ArgumentTypeError(f"{text!r} begins above its end")
    return lengths


def _add_trace(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "trace",
        help="show what host and device do in each step",
        description="Run decode steps and write what host and device did when: a trace for "
        "https://ui.perfetto.dev or chrome://tracing, and a picture.",
    )
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="shown (20)")
    parser.add_argument("--batch", type=positive, default=8, metavar="N", help="rows (8)")
    parser.add_argument(
        "--input-len", type=positive, default=64, metavar="TOKENS", help="of each prompt (64)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("trace.json"), metavar="FILE", help="(trace.json)"
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw a picture, too; needs Pillow"
    )
    add_engine_flags(parser)
    parser.set_defaults(home="dovetail.cli.trace")
