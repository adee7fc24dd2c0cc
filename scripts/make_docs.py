"""Write the generated pages of docs.

config.md of the options, server-errors.md of a tests' table, performance.md of benchmarks' results.

python scripts/make_docs.py            # write
python scripts/make_docs.py --check    # exit code 1 if a file is not what would be written
"""

import argparse
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from dovetail.cli.options import add_engine_flags  # noqa: E402
from dovetail.config.schema import EngineOptions  # noqa: E402
from scripts.performance_page import performance_page  # noqa: E402
from tests.support.bad_requests import BAD_REQUESTS, BadRequest  # noqa: E402

CONFIG_PAGE = ROOT / "docs" / "config.md"
ERRORS_PAGE = ROOT / "docs" / "server-errors.md"
PERFORMANCE_PAGE = ROOT / "docs" / "performance.md"

HEAD = """\
<!-- Made by scripts/make_docs.py from src/dovetail/config/schema.py; change that, then run it. -->
# Configuration

An engine starts without any option: each has a default that works, and `None` means "decide for
me". What was decided, and by whom:

    dovetail config explain [flags] [--json]

Options are keyword arguments of `dovetail.Engine` and flags of `dovetail generate`, `serve`,
`bench` and `config explain`. An unknown option, a value outside its range, or options that
contradict each other or the model are refused at start, with the name of the option and what would
be right. There is no configuration file, and no environment variable changes an option.

| option | flag | type | default | |
| --- | --- | --- | --- | --- |
"""

TAIL = """
Sizes are bytes, or a number with a unit: `512MiB` (1024s) or `2GB` (1000s).

`model` as a name needs the package `huggingface_hub` (`pip install huggingface_hub`). Weights in
safetensors, JSON files and templates are fetched, once, into the cache of that package, whose own
settings hold: `HF_HOME` says where the cache is, `HF_HUB_OFFLINE=1` forbids the network. An
existing folder comes before a name that reads the same.

A model with a sliding window (Mistral, some Qwen) runs with `context_len` up to that window, where
full attention computes the same; more is refused until window attention is there.
"""

ERRORS_HEAD = """\
<!-- Made by scripts/make_docs.py from tests/support/bad_requests.py; change that, then run it. -->
# Errors of the server, by example

Each line is sent by a test to a server of the embedded model (2,048 token ids, a context of 2,048
tokens): the reply has this status, `error.param` is this field, and the message has these words.
How errors look, and what else can go wrong: [server.md](server.md#errors).

| route | body | status | `param` | message has |
| --- | --- | --- | --- | --- |
"""


def config_page() -> str:
    """Return the text of docs/config.md."""
    about = attributes(inspect.cleandoc(EngineOptions.__doc__ or ""))
    hints, flags = get_type_hints(EngineOptions), flags_of_options()
    default = EngineOptions()
    rows = [
        (name, flags.get(name, ""), _type(hints[name]), getattr(default, name), about[name])
        for name in EngineOptions.__struct_fields__
    ]
    lines = [
        f"| `{name}` | {flag} | {kind} | `{value!r}` | {_markdown(text)} |"
        for name, flag, kind, value, text in rows
    ]
    return HEAD + "\n".join(lines) + "\n" + TAIL


def errors_page() -> str:
    """Return the text of docs/server-errors.md."""
    return ERRORS_HEAD + "\n".join(map(_error_row, BAD_REQUESTS)) + "\n"


def _error_row(bad: BadRequest) -> str:
    body = repr(bad.body)[2:-1] if isinstance(bad.body, bytes) else json.dumps(bad.body)
    body = body if len(body) <= 100 else body[:60] + " ... " + body[-15:]
    cells = (f"`{bad.route}`", f"`{body or ' '}`", str(bad.status), f"`{bad.param}`", bad.words)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def attributes(docstring: str) -> dict[str, str]:
    """Return name -> text of the docstring's ``Attributes`` section."""
    section = docstring.partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        start = re.match(r" {4}(\w+): (.*)", line)
        if start:
            name = start[1]
            found[name] = start[2]
        elif name and line.startswith(" " * 8):
            found[name] += " " + line.strip()
    return found


def flags_of_options() -> dict[str, str]:
    """Return option -> its flag as typed."""
    parser = argparse.ArgumentParser(add_help=False)
    add_engine_flags(parser)
    return {action.dest: f"`{action.option_strings[0]}`" for action in parser._actions}


def _type(hint: object) -> str:
    """Return a type in the words of a table cell."""
    if get_origin(hint) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) is tuple:
        return f"several {_type(get_args(hint)[0])}"
    if args := get_args(hint):
        return " or ".join(_type(arg) for arg in args)
    return "`None`" if hint is type(None) else f"`{getattr(hint, '__name__', hint)}`"


def _markdown(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description="Write the generated pages of docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    args = parser.parse_args()
    stale = False
    pages = {
        CONFIG_PAGE: config_page(),
        ERRORS_PAGE: errors_page(),
        PERFORMANCE_PAGE: performance_page(),
    }
    for page, text in pages.items():
        if not args.check:
            page.write_text(text, encoding="utf-8")
        elif page.read_text(encoding="utf-8") != text:
            print(f"{page.relative_to(ROOT)} is stale; run python scripts/make_docs.py")
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
