"""``dovetail generate``: text from a prompt, a chat, or a file of prompts.

Owns what goes to which stream: text and JSON lines to standard output, the rest to standard error.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import dovetail
from dovetail.cli.bodies import PromptFile, read_line
from dovetail.cli.options import (
    engine_options,
    logprob_fields,
    reply_fields,
    sampling_fields,
)
from dovetail.cli.progress import open_engine, progress_bar
from dovetail.core.generation import Generation
from dovetail.core.prompts import Prompt
from dovetail.core.routes import json_of
from dovetail.errors import RequestError
from dovetail.server.native_body import Call, requests_of
from dovetail.server.native_reply import ReplyMaker
from dovetail.wire.request import Request, SamplingParams


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    if args.prompts is not None:
        if args.prompt is not None or args.chat:
            raise RequestError(
                "--prompts", "goes without PROMPT and --chat; put chats into the file"
            )
        prompts = PromptFile(
            Path(args.prompts), sampling=sampling_fields(args), others=reply_fields(args)
        )
        _check_apart(args.prompts, args.output)
        with _open_output(args.output) as file, open_engine(engine_options(args)) as engine:
            return _print_replies(engine, prompts.requests(engine.requests), file)
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
    if hasattr(args, "capture"):
        raise RequestError("--capture", "goes with --json or --prompts: plain text has no rows")
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
    prompt = {"messages": [{"role": "user", "content": text}]} if args.chat else {"text": text}
    call = read_line(
        prompt | {"rid": "0"}, sampling=sampling_fields(args), others=reply_fields(args)
    )
    with open_engine(engine_options(args)) as engine:
        return _print_replies(engine, [(call, requests_of(call, engine.requests))], sys.stdout)


def _text_of(args: argparse.Namespace) -> str | None:
    if args.prompt != "-":
        return args.prompt
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(
            "standard input", f"is not valid {error.encoding}: {error.reason}"
        ) from None


def _print_replies(
    engine: "dovetail.Engine", calls: list[tuple[Call, list[Request]]], file: TextIO
) -> int:
    """Print a line a generation: call by call, item by item, sample by sample."""
    num_layers = engine.config.model.num_layers
    places: list[tuple[ReplyMaker, int, Request]] = []
    for call, requests in calls:
        maker = ReplyMaker(call, engine.tokenizer, num_layers=num_layers)
        places += [(maker, index, request) for index, request in enumerate(requests)]
    with progress_bar() as progress:
        task = progress.add_task("generating", total=len(places))
        waiting: dict[int, list[Generation]] = {}
        next_place = 0

        def on_finish(place: int, generations: list[Generation]) -> None:
            nonlocal next_place
            progress.advance(task)
            waiting[place] = generations
            if next_place == 0 and 0 in waiting:
                _empty(file)
            while next_place in waiting:
                maker, index, request = places[next_place]
                for generation in waiting.pop(next_place):
                    reply = maker.whole(index, request, generation)
                    file.write(b"".join(json_of(reply)).decode() + "\n")
                file.flush()
                next_place += 1

        engine.generate_requests([request for _, _, request in places], on_finish=on_finish)
    return 0


def _stream(engine: "dovetail.Engine", prompt: Prompt, params: SamplingParams) -> str:
    parts: list[str] = []
    for event in engine.stream(prompt, params):
        parts.append(event.text)
        sys.stdout.write(event.text)
        sys.stdout.flush()
        if event.finish_reason is not None and event.finish_reason.type == "error":
            raise RequestError("generation", event.finish_reason.message or "failed")
    sys.stdout.write("\n")
    return "".join(parts)


def _talk(engine: "dovetail.Engine", params: SamplingParams) -> int:
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


def _check_apart(prompts: str, output: str | None) -> None:
    """Refuse to write replies over the prompts, whatever the file is called."""
    if output is None or not (Path(prompts).is_file() and Path(output).is_file()):
        return  # a device may well be both
    if Path(prompts).samefile(output):
        raise RequestError("--output", f"{output} is the file of prompts; name another one")


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
