"""``dovetail serve``: the engine behind HTTP.

Owns the rules for its flags, and what is printed: one line when the server is ready, and one for
each error.
"""

import argparse
import logging
import re
import sys
from contextlib import ExitStack
from typing import Any

import dovetail
from dovetail.cli.options import engine_options
from dovetail.cli.progress import open_client
from dovetail.config.pool import kv_page_bytes
from dovetail.config.schema import EngineConfig
from dovetail.errors import ConfigError
from dovetail.server.capture_files import CaptureFolder
from dovetail.server.run import HttpServer, bound_socket, url_of
from dovetail.server.settings import ServerSettings

_EMBEDDED_NAME = "tiny-moe"
_OPEN_HOSTS = ("0.0.0.0", "::")


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
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
