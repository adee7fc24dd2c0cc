"""A tour of the engine in a minute, with the model that the package carries.

    python examples/demo.py [--depth N] [--lanes threaded]

1. Text streams from a mixture-of-experts model through scheduler, paged KV and overlap loop.
2. A second request shares its beginning: the prefix cache serves it. Ids and logprobs are shown.
3. The first half of an answer is sent back with the same seed: the same second half comes out.
4. The experts of each token of that answer, as a trainer would replay them.
5. ``dovetail serve`` answers a chat over HTTP, streamed, as OpenAI's clients expect it.
"""

import argparse
import http.client
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

import dovetail

PROMPT = """\
ROMEO
I dreamt a dream tonight
MERCUTIO
And so did I
ROMEO
Well what was yours
MERCUTIO
"""
FOLLOW_UP = "That dreamers often lie\nROMEO\n"
QUESTION = "What is 12 + 30?"
SEED = 7


def main() -> None:
    """Run the tour."""
    parser = argparse.ArgumentParser(description="A tour of the engine in a minute.")
    parser.add_argument("--depth", type=int, default=1, help="steps in flight (default: 1)")
    parser.add_argument("--lanes", default="inline", choices=["inline", "threaded"])
    args = parser.parse_args()
    console = Console(highlight=False)
    with dovetail.Engine(depth=args.depth, lanes=args.lanes, capture=("experts",)) as engine:
        show_engine(console, engine)
        stream_text(console, engine)
        show_prefix_hit(console, engine)
        continue_from_the_middle(console, engine)
        show_routes(console, engine)
    chat_over_http(console)
    console.print(
        "\nNext: [bold].venv/bin/dovetail generate --help[/bold], docs/step.md, docs/server.md, "
        "docs/capture.md, docs/rl.md"
    )


def show_engine(console: Console, engine: dovetail.Engine) -> None:
    """Say what is running."""
    config, model = engine.config, engine.config.model
    experts = model.moe
    assert experts is not None
    console.rule("the engine")
    console.print(
        f"{model.architecture}: {model.num_layers} layers, width {model.hidden_size}, "
        f"{experts.num_experts} experts, {experts.num_experts_per_tok} a token"
    )
    console.print(
        f"{config.device}, {config.dtype}, {config.num_pages} KV pages of {config.page_size} "
        f"tokens, overlap depth {config.depth}"
    )


def stream_text(console: Console, engine: dovetail.Engine) -> None:
    """Stream one answer."""
    console.rule("1. text streams")
    console.print(f"[dim]{PROMPT}[/dim]", end="")
    params = dovetail.SamplingParams(
        max_new_tokens=96, temperature=0.8, top_p=0.95, sampling_seed=SEED
    )
    usage = None
    for event in engine.stream(PROMPT, params):
        console.print(event.text, end="", markup=False, soft_wrap=True)
        usage = event.usage or usage
    console.print(f"\n[dim]{usage}[/dim]")


def show_prefix_hit(console: Console, engine: dovetail.Engine) -> None:
    """Send a prompt that begins like the last one, and show its tokens one by one."""
    console.rule("2. a second request with the same beginning")
    params = dovetail.SamplingParams(max_new_tokens=12, temperature=0.0)
    [generation] = engine.generate(PROMPT + FOLLOW_UP, params)
    usage = generation.usage
    console.print(
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from the prefix cache"
    )
    table = Table("position", "id", "token", "logprob", "probability")
    position = len(generation.prompt_token_ids)
    for token_id, logprob in zip(generation.token_ids, generation.logprobs, strict=True):
        text = engine.tokenizer.decode([token_id])
        table.add_row(
            str(position), str(token_id), repr(text), f"{logprob:.4f}", f"{math.exp(logprob):.1%}"
        )
        position += 1
    console.print(table)


def continue_from_the_middle(console: Console, engine: dovetail.Engine) -> None:
    """Resend a prompt with half of its answer: noise is keyed by position, so it goes on alike."""
    console.rule("3. the same seed continues the same tokens")
    params = dovetail.SamplingParams(max_new_tokens=24, sampling_seed=SEED)
    [whole] = engine.generate(PROMPT, params)
    half = whole.token_ids[:12]
    params = dovetail.SamplingParams(
        max_new_tokens=len(whole.token_ids) - len(half), sampling_seed=SEED
    )
    [rest] = engine.generate(list(whole.prompt_token_ids + half), params)
    verdict = "equal" if half + rest.token_ids == whole.token_ids else "DIFFERENT"
    console.print(f"at once      {list(whole.token_ids)}")
    console.print(f"in two parts {list(half)} + {list(rest.token_ids)}")
    console.print(f"token ids are [bold]{verdict}[/bold]")


def show_routes(console: Console, engine: dovetail.Engine) -> None:
    """Show which experts the last tokens went through: a row a layer, a column a token."""
    console.rule("4. the experts of each token")
    params = dovetail.SamplingParams(max_new_tokens=12, sampling_seed=SEED)
    [generation] = engine.generate(PROMPT, params, capture=("experts",))
    routes = generation.routes
    assert routes is not None
    ids = generation.prompt_token_ids + generation.token_ids
    routes.validate(ids)
    shown = range(max(routes.end - 6, 0), routes.end)  # fits 80 columns
    console.print(
        f"{routes.num_rows} rows for {len(ids)} tokens, {len(routes.to_bytes())} bytes: the last "
        "token was sampled, and was no input"
    )
    table = Table("layer", *(repr(engine.tokenizer.decode([ids[p]])) for p in shown))
    for index, layer in enumerate(routes.layer_ids):
        cells = (routes.ids[p - routes.start, index] for p in shown)
        table.add_row(str(layer), *(_heat(cell.tolist(), routes.num_experts) for cell in cells))
    console.print(table)
    console.print("[dim]a cell has a place for each expert: first choice, second choice[/dim]")


def _heat(chosen: list[int], num_experts: int) -> str:
    """Return a cell: full for the first choice, paler for the later ones."""
    shades = "\N{FULL BLOCK}\N{DARK SHADE}\N{MEDIUM SHADE}\N{LIGHT SHADE}"
    places = ["\N{MIDDLE DOT}"] * num_experts
    for rank, expert in enumerate(chosen):
        places[expert] = shades[min(rank, 3)]
    return "".join(places)


def chat_over_http(console: Console) -> None:
    """Start a server, ask it one question with nothing but the standard library, end it."""
    console.rule("5. the same engine behind HTTP")
    with running_server() as address:
        connection = http.client.HTTPConnection(address, timeout=60)
        body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body | {"temperature": 0}),
            {"Content-Type": "application/json"},
        )
        reply = connection.getresponse()
        console.print(f"POST http://{address}/v1/chat/completions: {reply.status} {reply.reason}")
        console.print(f"[dim]{QUESTION}[/dim] ", end="")
        for line in reply:
            data = line.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                delta = json.loads(data)["choices"][0]["delta"]
                console.print(delta.get("content", ""), end="", markup=False)
        connection.close()
    console.print("\n\nWith [bold].venv/bin/dovetail serve[/bold] running in another shell:")
    kind = "-H 'Content-Type: application/json'"
    chat = json.dumps({"messages": [{"role": "user", "content": QUESTION}]})
    for words in (
        "localhost:30000/health",
        f"localhost:30000/generate {kind} -d '{json.dumps({'text': 'KING HENRY'})}'",
        f"localhost:30000/v1/chat/completions {kind} -d '{chat}'",
    ):
        console.print(f"  curl {words}", markup=False, soft_wrap=True)


@contextmanager
def running_server() -> Iterator[str]:
    """Run ``dovetail serve`` on a free port; yield host and port."""
    words = [sys.executable, "-m", "dovetail.cli", "serve", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()  # "dovetail: serving ... at http://HOST:PORT"
            if " at http://" not in ready:
                raise SystemExit("the server did not start; it says why above")
            yield ready.strip().rpartition("http://")[2]
        finally:
            process.terminate()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
