"""The generated pages are what scripts/make_docs.py makes now."""

import inspect

from dovetail.config.schema import EngineOptions
from scripts.make_docs import (
    CONFIG_PAGE,
    ERRORS_PAGE,
    attributes,
    config_page,
    errors_page,
    flags_of_options,
)


def test_the_committed_pages_are_not_stale() -> None:
    for page, text in ((CONFIG_PAGE, config_page()), (ERRORS_PAGE, errors_page())):
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
