"""The examples in the documentation run, and what they assert holds."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import dovetail
from examples import demo

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/sampling.md", "docs/capture.md", "docs/replay.md", "docs/rl.md")


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """Each fenced Python block of a page: the line of its fence, and its code."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start()) + 1, match[1])
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str) -> None:
    """In the order of the page, in one namespace; a traceback names the page's line."""
    blocks = python_blocks(ROOT / page)
    assert len(blocks) > 2
    namespace: dict[str, object] = {}
    for line, code in blocks:
        exec(compile("\n" * line + code, page, "exec"), namespace)


def test_the_routes_example_gets_rows_in_each_way() -> None:
    """It starts its own server: SGLang's form, our own, and a file have the same rows."""
    done = subprocess.run(
        [sys.executable, "examples/routes.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for line in ("equal in both forms: True", "by a file: file, ", "equal by a file: True"):
        assert line in done.stdout, done.stdout


def test_the_demo_shows_the_experts_of_its_request() -> None:
    """A cell for each MoE layer and token, with a first and a second choice."""
    said = io.StringIO()
    with dovetail.Engine(capture=("experts",)) as engine:
        moe = engine.config.model.moe
        demo.show_routes(Console(file=said, width=80), engine)
    text = said.getvalue()
    assert moe is not None and "the last token was sampled" in " ".join(text.split())
    num_cells = 6 * len(moe.layer_ids)
    assert text.count("\N{FULL BLOCK}") == text.count("\N{DARK SHADE}") == num_cells
    assert text.count("\N{MIDDLE DOT}") == num_cells * (moe.num_experts - 2)


def test_every_sampling_parameter_is_on_the_page() -> None:
    from dovetail.wire.request import LogprobParams, SamplingParams

    text = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    for name in SamplingParams.__struct_fields__:
        assert f"| `{name}` |" in text
    for name in LogprobParams.__struct_fields__:
        assert f"`{name}`" in text or f"LogprobParams.{name}`" in text
