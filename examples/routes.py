"""Which experts did each token go through? Asked over HTTP, in both forms, and by a file.

    # in another terminal; or let this start one
    dovetail serve --capture experts --capture-files /dev/shm/dovetail
    python examples/routes.py [--url http://127.0.0.1:30000]

1. SGLang's form: base64 of int32 over all layers, without a header; the client knows the shape.
2. Our own, as msgpack: a header that says what it is, and raw bytes. A trainer keeps the trace.
3. The same by a file in memory, for a client on the server's machine: the reply has the header.
All hold the same rows, and a row belongs to the token that was the *input*.
"""

import argparse
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from dovetail.config.hub import locate_model
from dovetail.config.model import ModelConfig
from dovetail.replay.files import CaptureFileClient
from dovetail.replay.records import RouteHeader, RouteTrace, from_sglang

PROMPT = "KING HENRY\nOnce more unto the breach"
SAMPLING = {"max_new_tokens": 16, "temperature": 0}


def main() -> None:
    """Ask in each way and compare."""
    parser = argparse.ArgumentParser(description="Expert rows over HTTP.")
    parser.add_argument("--url", help="a server of the embedded model; by default one is started")
    args = parser.parse_args()
    if args.url is not None:
        show(args.url)
        return
    with own_server() as url:
        show(url)


def show(url: str) -> None:
    """Ask a server for expert rows in each way."""
    folder, _ = locate_model(None)
    model = ModelConfig.from_folder(folder)
    assert model.moe is not None
    body = {"text": PROMPT, "sampling_params": SAMPLING, "return_prompt_token_ids": True}
    reply = post(url, body | {"return_routed_experts": True})
    ids = reply["prompt_token_ids"] + reply["output_ids"]
    theirs = from_sglang(
        reply["meta_info"]["routed_experts"],
        ids,
        num_hidden_layers=model.num_layers,
        layer_ids=model.moe.layer_ids,
        num_experts=model.moe.num_experts,
        num_experts_per_tok=model.moe.num_experts_per_tok,
    )
    reply = post(url, body | {"capture": ["experts"]})
    header = msgspec.convert(reply["meta_info"]["routes"], RouteHeader)
    ours = RouteTrace.from_header(header, reply["meta_info"]["captured"]["experts"]["data"])
    ours.validate(ids, layer_ids=model.moe.layer_ids, num_experts=model.moe.num_experts)
    print(f"{len(ids)} tokens, {ours.num_rows} rows: the last token was sampled, and was no input")
    print(f"header: {msgspec.json.encode(ours.header).decode()}")
    print(f"position {ours.end - 1}, by MoE layer: {ours.ids[-1].tolist()}")
    print(f"equal in both forms: {(theirs.ids == ours.ids).all()}")
    print(f"bytes: {len(ours.to_bytes())} with the header")
    with CaptureFileClient(url) as file:
        meta = post(url, body | {"capture": ["experts"], "capture_file": file.name})["meta_info"]
        by_file = file.take_routes(meta)
        print(f"by a file: {meta['capture_transport']['type']}, {file.info.path}")
    print(f"equal by a file: {(by_file.ids == ours.ids).all()}")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Call /generate; the reply as msgpack, where rows are raw bytes."""
    headers = {"Content-Type": "application/json", "Accept": "application/msgpack"}
    call = urllib.request.Request(f"{url}/generate", msgspec.json.encode(body), headers)
    with urllib.request.urlopen(call) as reply:
        return msgspec.msgpack.decode(reply.read())


@contextmanager
def own_server() -> Iterator[str]:
    """Run ``dovetail serve`` on a free port, and yield its address."""
    with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
        flags = ["--port", "0", "--capture", "experts", "--capture-files", folder]
        process = subprocess.Popen(
            [sys.executable, "-m", "dovetail.cli", "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        try:
            print("starting a server of the embedded model ...", flush=True)
            line = process.stdout.readline()
            if " at http" not in line:
                raise SystemExit("the server did not start; run dovetail serve to see why")
            yield line.split(" at ")[1].strip()
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
