"""The examples in the documentation run, and what they assert holds."""

import re
from pathlib import Path

import pytest

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


def test_every_sampling_parameter_is_on_the_page() -> None:
    from dovetail.wire.request import LogprobParams, SamplingParams

    text = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    for name in SamplingParams.__struct_fields__:
        assert f"| `{name}` |" in text
    for name in LogprobParams.__struct_fields__:
        assert f"`{name}`" in text or f"LogprobParams.{name}`" in text
