"""``dovetail serve``: the engine behind HTTP.

Owns the flags of the HTTP side, and what is printed: one line when the server is ready, and one for
each error.
"""

import argparse
import logging
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dovetail
from dovetail.cli.options import add_engine_flags, engine_options, positive
from dovetail.cli.progress import open_client
from dovetail.config.resolve import kv_page_bytes
from dovetail.config.schema import EngineConfig
from dovetail.errors import ConfigError
from dovetail.server.capture_files import CaptureFolder
from dovetail.server.run import HttpServer, bound_socket, url_of
from dovetail.server.settings import DEFAULT_PORT, ServerSettings

_EMBEDDED_NAME = "tiny-moe"
_OPEN_HOSTS = ("0.0.0.0", "::")

_EPILOG = """\
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


def add_serve_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, in the dialects of OpenAI and SGLang",
        description="Serve a model over HTTP, in the dialects of OpenAI and SGLang.",
        epilog=_EPILOG,
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
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    logging.basicConfig(
        level=logging.DEBUG if args.debug else logging.WARNING,
        format="dovetail: %(levelname)s: %(message)s",
    )
    settings = _settings(args)
    if args.host in _OPEN_HOSTS and settings.api_key is None:
        print(
            f"dovetail: warning: {args.host} lets in everybody who can reach this machine; "
            "give --api-key",
            file=sys.stderr,
        )
    with ExitStack() as stack:  # before the weights: what is wrong here shows at once
        sock = stack.enter_context(bound_socket(args.host, args.port))
        folder = None
        if args.capture_files is not None:
            folder = CaptureFolder(args.capture_files)
            stack.callback(folder.close)
        client = open_client(engine_options(args))

        def on_ready() -> None:
            print(f"{describe(settings.model_name, client.config)} at {url_of(sock)}", flush=True)

        return HttpServer(client, settings, sock, folder, on_ready=on_ready).run()


def _settings(args: argparse.Namespace) -> ServerSettings:
    if args.api_key == "":
        raise ConfigError("api_key", "is empty; give a key, or leave the flag out")
    if args.api_key is not None and not re.fullmatch("[!-~]+", args.api_key):
        raise ConfigError(
            "api_key", "no client could send it; give letters, digits and signs of ASCII, no spaces"
        )
    if not 0 <= args.port < 2**16:
        raise ConfigError("port", f"is {args.port}; the legal range is 0 to 65535")
    if args.capture_files is not None and not hasattr(args, "capture"):
        raise ConfigError("capture_files", "nothing is captured; give --capture experts with it")
    given: dict[str, Any] = {}
    if hasattr(args, "max_body_bytes"):
        given["max_body_bytes"] = args.max_body_bytes
    name = args.served_model_name or getattr(args, "model", _EMBEDDED_NAME)
    return ServerSettings(
        model_name=name, version=dovetail.__version__, api_key=args.api_key, **given
    )


def describe(model_name: str, config: EngineConfig) -> str:
    """Return what is served, in one line."""
    page_bytes = kv_page_bytes(config.model, dtype=config.dtype, page_size=config.page_size)
    num_bytes = config.num_pages * page_bytes
    return (
        f"dovetail: serving {model_name} on {config.device} in {config.dtype}, "
        f"{config.num_pages * config.page_size} tokens of KV ({num_bytes / 2**20:.0f} MiB),"
    )
