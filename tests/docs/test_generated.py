"""The generated pages are what scripts/make_docs.py makes now."""

import inspect

import pytest

from dovetail.config.schema import EngineOptions
from scripts.make_docs import (
    CONFIG_PAGE,
    ERRORS_PAGE,
    PERFORMANCE_PAGE,
    attributes,
    config_page,
    errors_page,
    flags_of_options,
)
from scripts.performance_page import filled, performance_page


def test_the_committed_pages_are_not_stale() -> None:
    for page, text in (
        (CONFIG_PAGE, config_page()),
        (ERRORS_PAGE, errors_page()),
        (PERFORMANCE_PAGE, performance_page()),
    ):
        assert page.read_text(encoding="utf-8") == text, "run python scripts/make_docs.py"


def test_every_option_is_described_and_nothing_else() -> None:
    described = attributes(inspect.cleandoc(EngineOptions.__doc__ or ""))
    assert tuple(described) == EngineOptions.__struct_fields__
    assert all(described.values())


def test_a_description_may_take_several_lines() -> None:
    docstring = "Title.\n\nAttributes:\n    one: first\n        line.\n    two: second.\n\nThe end."
    assert attributes(docstring) == {"one": "first line.", "two": "second."}


def test_every_option_but_those_of_tests_has_a_flag() -> None:
    assert set(EngineOptions.__struct_fields__) - set(flags_of_options()) == {"lanes"}


# -- figures in docs/performance.md -------------------------------------------------------------


def line_of(work: str, batch: int, value: float, best_peer: float | None) -> dict:
    rates = {"copy_GB_per_s": 4230.0, "gemm_TFLOP_per_s": 708.0}
    return {
        "shape": "big", "work": work, "batch": batch, "value": value, "unit": "ms", "floor": 2.0,
        "best_peer": best_peer, "rates": rates, "commit": f"c{batch}",
    }  # fmt: skip


def test_figures_are_filled_in_beside_what_is_said_of_them() -> None:
    text = "| {{big b 1}} | why |\n| {{big b 32}} | so |\n| {{big c 16}} | |\n{{summary big}}"
    works = [line_of("b", 1, 3.0, 4.0), line_of("b", 32, 5.0, 4.0)]
    assert filled(text, works=works, steps=[], capture=[]) == (
        "| b, 1 row | 3.00 ms | 4.00 | 0.75 | 2.00 | 1.50 | why |\n"
        "| b, 32 rows | 5.00 ms | 4.00 | 1.25 | 2.00 | 2.50 | so |\n"
        "| c | not measured | | | |  | |\n"
        "Slower than the best other: b at 32. The machine's own rates in these runs: "
        "copies 4.23 TB/s, 99 % of the floor's; products 708 TFLOP/s, 90 %. "
        "Measured at c1, c32."
    )


def test_counts_that_agree_stand_once_and_times_of_all_runs() -> None:
    def run(packet_us: float, copies: float = 1.0, batch: int = 256) -> list[dict]:
        of = {"shape": "big", "batch": batch, "capture": [], "commit": f"c{packet_us:.0f}"}
        counts = {"HtoD": copies, "DtoH": 1.0, "graph launches": 1.0, "waits": 0.005}
        us = {"plan": packet_us, "commit": 100.0}
        return [
            of | {"work": "copies a step: decode", "unit": "copies", "a_step": counts},
            of | {"work": "step: packet", "unit": "us", "value": packet_us, "us": us},
            of | {"work": "step: host time", "unit": "us", "value": 9 * packet_us, "us": us},
        ]

    counted = (
        "decode: {} copies to the device, 1 back, 0 allocations, 1 graph and 0 kernels launched, "
        "0.005 waits"
    )
    runs = [*run(27.1), *run(23.8)]
    assert filled("{{steps}}\n{{steps at}}", works=[], steps=runs, capture=[]) == (
        f"* {counted.format(1)}\n* packet, us, `big`: 27 (c27), 24 (c24)\n"
        "* plan and commit, us, `big`: 127 (c27), 124 (c24)\n"
        "* all that the host does but wait, us, `big`: 244 (c27), 214 (c24)\n"
        "Measured at c27, c24"
    )
    runs += run(35.3, copies=2.0)
    assert filled("{{steps}}", works=[], steps=runs, capture=[]).startswith(
        f"* {counted.format(1)}\n* {counted.format(2)}\n"
        "* packet, us, `big`: 27 (c27), 24 (c24), 35 (c35)\n"
    )
    with pytest.raises(ValueError, match="differ in rows"):
        filled("{{steps}}", works=[], steps=runs + run(9.0, batch=1), capture=[])


def test_a_figure_of_which_nothing_is_said_is_an_error() -> None:
    with pytest.raises(ValueError, match="no row for big c 16"):
        filled("| {{big b 1}} |", works=[line_of("c", 16, 3.0, None)], steps=[], capture=[])
    with pytest.raises(ValueError, match="nothing is known of summary small"):
        filled("{{summary small}}", works=[], steps=[], capture=[])
