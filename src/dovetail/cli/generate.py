"""``dovetail generate``: text from a prompt, a chat, or a file of prompts."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dovetail.cli.options import (
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    sampling_params,
)
from dovetail.core.engine import Engine
from dovetail.core.generation import Generation
from dovetail.core.prompts import Prompt, prompt_of
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
    add_engine_flags(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    if args.prompts is not None:
        if args.prompt is not None or args.chat:
            raise RequestError(
                "--prompts", "goes without PROMPT and --chat; put chats into the file"
            )
        bodies = read_bodies(Path(args.prompts), params)
        with _engine(args) as engine:
            return _run_file(engine, bodies, args)
    if args.output is not None:
        raise RequestError("--output", "goes with --prompts")
    if args.prompt is None and not args.chat:
        raise RequestError("PROMPT", "is missing; give a text, --chat or --prompts FILE.jsonl")
    text = _standard_input() if args.prompt == "-" else args.prompt
    with _engine(args) as engine:
        if text is None:
            return _talk(engine, params)
        prompt: Prompt = [{"role": "user", "content": text}] if args.chat else text
        if args.json:
            _print_json(engine.generate(prompt, params)[0], label="0", file=sys.stdout)
        else:
            _stream(engine, prompt, params)
    return 0


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(
            "standard input", f"is not valid {error.encoding}: {error.reason}"
        ) from None


def read_bodies(path: Path, defaults: SamplingParams) -> dict[int, GenerateBody]:
    """Return the requests of a JSONL file by line number, which counts from 1.

    What a line leaves open comes from ``defaults``.

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
                given = raw.get("sampling_params")
                if given is None or isinstance(given, dict):
                    raw["sampling_params"] = _set_fields(defaults) | (given or {})
            body = msgspec.convert(raw, GenerateBody)
            prompt_of(body)
        except (msgspec.DecodeError, RecursionError, RequestError) as error:
            raise RequestError(f"{path} line {number}", str(error)) from None
        bodies[number] = body
    if not bodies:
        raise RequestError("--prompts", f"{path} holds no request")
    return bodies


def _set_fields(params: SamplingParams) -> dict[str, Any]:
    default, values = SamplingParams(), msgspec.to_builtins(params)
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _run_file(engine: Engine, by_line: dict[int, GenerateBody], args: argparse.Namespace) -> int:
    bodies = list(by_line.values())
    labels = [body.rid if body.rid is not None else str(i) for i, body in enumerate(bodies)]
    with (
        _open_output(args.output) as file,
        _progress() as progress,
    ):
        task = progress.add_task("generating", total=len(bodies))
        waiting: dict[int, Generation] = {}
        next_index = 0

        def on_finish(index: int, generation: Generation) -> None:
            nonlocal next_index
            progress.advance(task)
            waiting[index] = generation
            while next_index in waiting:  # lines come out in the order of the file
                _print_json(waiting.pop(next_index), label=labels[next_index], file=file)
                next_index += 1

        try:
            engine.generate(
                [prompt_of(body) for body in bodies],
                [body.sampling_params for body in bodies],
                on_finish=on_finish,
            )
        except RequestError as error:
            raise _with_line(error, args.prompts, list(by_line)) from None
    return 0


def _with_line(error: RequestError, path: str, numbers: list[int]) -> RequestError:
    """Say in which line of the file the prompt is that ``Engine.generate`` refused."""
    match = re.match(r"prompts\[(\d+)\]\.", str(error))
    if match is None:  # a single prompt
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


def _print_json(generation: Generation, *, label: str, file: TextIO) -> None:
    file.write(json.dumps(generate_reply(generation, label=label), ensure_ascii=False) + "\n")
    file.flush()


@contextmanager
def _engine(args: argparse.Namespace) -> Iterator[Engine]:
    with _progress() as progress:
        task = progress.add_task("loading weights", total=None)

        def on_progress(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        engine = Engine(on_progress=on_progress, **engine_options(args))
    with engine:
        yield engine


@contextmanager
def _open_output(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed below
    except OSError as error:
        raise RequestError("--output", f"cannot write {path}: {error.strerror}") from None
    with file:
        yield file


def _progress() -> Progress:
    """A progress bar on standard error that is gone when it is done; none without a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
