"""``dovetail generate``: text from a prompt, a chat, or a file of prompts.

Owns what goes to which stream: text and JSON lines to standard output, the rest to standard error.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

import msgspec

from dovetail.cli.options import (
    add_engine_flags,
    add_logprob_flags,
    add_sampling_flags,
    engine_options,
    logprob_fields,
    sampling_fields,
)
from dovetail.cli.progress import open_engine, progress_bar
from dovetail.core.engine import Engine
from dovetail.core.generation import Generation
from dovetail.core.prompts import Prompt, logprobs_of, prompt_of
from dovetail.core.reply import generate_reply
from dovetail.errors import RequestError
from dovetail.wire.request import GenerateBody, SamplingParams

_EPILOG = """\
examples:
  dovetail generate "KING HENRY"                      stream text from the embedded model
  dovetail generate --chat "What is 12 + 30?"         one question through the chat template
  dovetail generate --chat                            talk; an empty line or Ctrl-D ends it
  dovetail generate --json "KING HENRY"               ids and logprobs as JSON
  dovetail generate --prompts in.jsonl -o out.jsonl   many prompts at once

a line of --prompts is the body of a /generate call:
  {"text": "KING HENRY", "sampling_params": {"temperature": 0, "max_new_tokens": 20}}
  {"input_ids": [1037, 492], "rid": "my-own-label"}
  {"messages": [{"role": "user", "content": "Hello"}]}
  {"text": "KING", "logprob_start_len": 0, "top_logprobs_num": 5, "token_ids_logprob": [10]}
a reply has logprobs unless its line says "return_logprob": false
"""


def add_generate_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="generate text from a prompt, a chat or a file of prompts",
        description="Generate text. Streams to standard output.",
        epilog=_EPILOG,
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
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.prompts is not None:
        if args.prompt is not None or args.chat:
            raise RequestError(
                "--prompts", "goes without PROMPT and --chat; put chats into the file"
            )
        bodies = read_bodies(
            Path(args.prompts), sampling=sampling_fields(args), others=logprob_fields(args)
        )
        with _open_output(args.output) as file, open_engine(engine_options(args)) as engine:
            try:
                return _print_replies(engine, list(bodies.values()), file)
            except RequestError as error:
                raise _with_line(error, args.prompts, list(bodies)) from None
    if args.output is not None:
        raise RequestError("--output", "goes with --prompts")
    if args.prompt is None and not args.chat:
        raise RequestError("PROMPT", "is missing; give a text, --chat or --prompts FILE.jsonl")
    if args.json:
        return _run_json(args)
    params = SamplingParams(**sampling_fields(args))
    if params.n != 1:
        raise RequestError("--n", "goes with --json or --prompts: texts cannot stream side by side")
    if given := logprob_fields(args):
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise RequestError(flags, "goes with --json or --prompts: plain text has no logprobs")
    text = _text_of(args)
    with open_engine(engine_options(args)) as engine:
        if text is None:
            return _talk(engine, params)
        _stream(engine, [{"role": "user", "content": text}] if args.chat else text, params)
    return 0


def _run_json(args: argparse.Namespace) -> int:
    text = _text_of(args)
    if text is None:
        raise RequestError("PROMPT", "is missing; --json does not go with a talk")
    prompt = {"messages": ({"role": "user", "content": text},)} if args.chat else {"text": text}
    body = GenerateBody(
        **prompt,
        **logprob_fields(args),
        sampling_params=SamplingParams(**sampling_fields(args)),
        return_logprob=True,
    )
    with open_engine(engine_options(args)) as engine:
        return _print_replies(engine, [body], sys.stdout)


def _text_of(args: argparse.Namespace) -> str | None:
    if args.prompt != "-":
        return args.prompt
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(
            "standard input", f"is not valid {error.encoding}: {error.reason}"
        ) from None


def read_bodies(
    path: Path, *, sampling: dict[str, Any], others: dict[str, Any]
) -> dict[int, GenerateBody]:
    """Return the requests of a JSONL file by line number, which counts from 1.

    Args:
        path: the file.
        sampling: sampling parameters that a line may leave open.
        others: other fields that a line may leave open; ``return_logprob`` is true.

    Raises:
        RequestError: names the line and the field.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RequestError("--prompts", f"cannot read {path}: {error.strerror}") from None
    bodies: dict[int, GenerateBody] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            raw = msgspec.json.decode(line)
            if isinstance(raw, dict):
                raw = {"return_logprob": True, **others, **cast(dict[str, Any], raw)}
                given = raw.get("sampling_params")
                if given is None or isinstance(given, dict):
                    raw["sampling_params"] = sampling | (given or {})
            body = msgspec.convert(raw, GenerateBody, str_keys=True)
            prompt_of(body)
        except (msgspec.DecodeError, RecursionError, RequestError) as error:
            raise RequestError(f"{path} line {number}", str(error)) from None
        bodies[number] = body
    if not bodies:
        raise RequestError("--prompts", f"{path} holds no request")
    return bodies


def _print_replies(engine: Engine, bodies: list[GenerateBody], file: TextIO) -> int:
    """Print a line a generation, in the order of the bodies."""
    with progress_bar() as progress:
        task = progress.add_task("generating", total=len(bodies))
        waiting: dict[int, list[Generation]] = {}
        next_index = 0

        def on_finish(index: int, generations: list[Generation]) -> None:
            nonlocal next_index
            progress.advance(task)
            waiting[index] = generations
            if next_index == 0 and 0 in waiting:
                _empty(file)
            while next_index in waiting:
                body = bodies[next_index]
                label = body.rid if body.rid is not None else str(next_index)
                for generation in waiting.pop(next_index):
                    reply = generate_reply(generation, label=label, logprobs=logprobs_of(body))
                    file.write(json.dumps(reply, ensure_ascii=False, allow_nan=False) + "\n")
                file.flush()
                next_index += 1

        engine.generate_bodies(bodies, on_finish=on_finish)
    return 0


def _with_line(error: RequestError, path: str, numbers: list[int]) -> RequestError:
    """Say in which line of the file the body is that ``Engine.generate_bodies`` refused."""
    match = re.match(r"bodies\[(\d+)\]\.", str(error))
    if match is None:  # a single body
        return RequestError(f"{path} line {numbers[0]}", str(error))
    return RequestError(f"{path} line {numbers[int(match[1])]}", str(error)[match.end() :])


def _stream(engine: Engine, prompt: Prompt, params: SamplingParams) -> str:
    parts: list[str] = []
    for event in engine.stream(prompt, params):
        parts.append(event.text)
        sys.stdout.write(event.text)
        sys.stdout.flush()
        if event.finish_reason is not None and event.finish_reason.type == "error":
            raise RequestError("generation", event.finish_reason.message or "failed")
    sys.stdout.write("\n")
    return "".join(parts)


def _talk(engine: Engine, params: SamplingParams) -> int:
    """Chat until an empty line or the end of input; each turn reuses the cached prefix."""
    messages: list[dict[str, str]] = []
    while True:
        sys.stderr.write("you> ")
        sys.stderr.flush()
        line = sys.stdin.readline().strip()
        if not line:
            return 0
        messages.append({"role": "user", "content": line})
        answer = _stream(engine, messages, params)
        messages.append({"role": "assistant", "content": answer})


@contextmanager
def _open_output(path: str | None) -> Iterator[TextIO]:
    """Open the file, if there is one, and keep what it holds: the run may be refused yet."""
    if path is None:
        yield sys.stdout
        return
    try:
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # closed below
    except OSError as error:
        raise RequestError("--output", f"cannot write {path}: {error.strerror}") from None
    with file:
        yield file


def _empty(file: TextIO) -> None:
    """Drop what a file of ``_open_output`` held before."""
    if file is not sys.stdout:
        with suppress(OSError):  # a device or a pipe holds nothing
            file.truncate(0)
