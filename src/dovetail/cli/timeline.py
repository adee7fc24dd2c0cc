"""A picture of what ran when: a row for each kind of host call and each lane, colours by name.

Owns the drawing. Pillow is optional and imported when a picture is asked for, and never else.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.cli.options import PLOT_INSTALL
from dovetail.errors import ConfigError
from dovetail.exec.trace import Span

COLOURS = {
    "plan": "#4c78a8", "submit": "#f58518", "wait": "#bab0ac", "commit": "#54a24b",
    "upload": "#e45756", "run": "#72b7b2", "download": "#b279a2", "read_out": "#eeca3b",
    "replay": "#9ecae9",
}  # fmt: skip
_OTHER = "#9d755d"
_WIDTH, _ROW_HEIGHT, _LEFT, _TOP, _RIGHT = 1800, 46, 120, 44, 20
_FONT_SIZE = 16
_NUM_TICKS = 10


def load_pillow() -> tuple[Any, Any, Any]:
    """Return Pillow's modules ``Image``, ``ImageDraw`` and ``ImageFont``.

    Raises:
        ConfigError: it is not installed; says how to.
    """
    try:
        return tuple(
            importlib.import_module(f"PIL.{name}") for name in ("Image", "ImageDraw", "ImageFont")
        )  # type: ignore[return-value]
    except ModuleNotFoundError:
        raise ConfigError(
            "png", f"a picture needs Pillow: {PLOT_INSTALL}; or leave out --png"
        ) from None


def row_of(span: Span) -> str:
    """Return the name of the row that a span stands in."""
    if span.row == "graph":
        return "graph"
    return f"host: {span.name}" if span.row == "host" else f"{span.row} lane"


def draw_timeline(spans: Sequence[Span], title: str, file: Path) -> None:
    """Write a PNG.

    Args:
        spans: what is shown; the picture is as long as they are.
        title: stands above.
        file: where to.

    Raises:
        ConfigError: Pillow is not installed.
    """
    image_module, draw_module, font_module = load_pillow()
    order = ["host: plan", "host: submit", "host: wait", "host: commit"]
    order += ["compute lane", *(["graph"] if any(s.row == "graph" for s in spans) else [])]
    order += ["copy lane"]
    height = _TOP + _ROW_HEIGHT * len(order) + 30
    image = image_module.new("RGB", (_WIDTH, height), "white")
    draw, font = draw_module.Draw(image), font_module.load_default(size=_FONT_SIZE)
    begin_s = min(span.begin_s for span in spans)
    scale = (_WIDTH - _LEFT - _RIGHT) / (max(span.end_s for span in spans) - begin_s)

    def at(seconds: float) -> float:
        return _LEFT + (seconds - begin_s) * scale

    draw.text((10, 10), title, fill="black", font=font)
    bottom = _TOP + _ROW_HEIGHT * len(order)
    for tick in range(_NUM_TICKS + 1):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * tick / _NUM_TICKS
        draw.line([(x, _TOP), (x, bottom)], fill="#dddddd")
        label = f"{1e3 * (x - _LEFT) / scale:.2f} ms"
        anchor = {0: "la", _NUM_TICKS: "ra"}.get(tick, "ma")
        draw.text((x, bottom + 6), label, fill="black", font=font, anchor=anchor)
    for number, row in enumerate(order):
        top = _TOP + _ROW_HEIGHT * number
        draw.text((10, top + 12), row, fill="black", font=font)
        for span in (span for span in spans if row_of(span) == row):
            box = [
                (at(span.begin_s), top + 6),
                (max(at(span.end_s), at(span.begin_s) + 1), top + 38),
            ]
            # An edge in white tells neighbours apart, where there is room for one.
            edge = "white" if box[1][0] - box[0][0] > 3 else None
            draw.rectangle(box, fill=COLOURS.get(span.name, _OTHER), outline=edge)
    image.save(file, format="PNG")
