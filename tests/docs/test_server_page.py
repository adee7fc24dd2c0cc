"""docs/server.md names every route and field that there is, and no route that there is not."""

import re
from pathlib import Path
from unittest.mock import Mock

from dovetail.server import native_body
from dovetail.server.app import route_table
from dovetail.server.openai import body as openai_body
from dovetail.server.settings import ServerSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def test_every_route() -> None:
    routes = route_table(
        Mock(), Mock(), Mock(), ServerSettings(model_name="m", version="0"), None, Mock()
    )
    paths = {route.path for route in routes}  # type: ignore[attr-defined]
    table = PAGE.partition("| route |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(/[\w/]+)`", table)) == paths


def test_every_field() -> None:
    structs = (
        native_body.GenerateFields,
        openai_body.SamplingFields,
        openai_body.StreamOptions,
        openai_body.CallFields,
        openai_body.ChatFields,
        openai_body.CompletionFields,
    )
    names = {name for struct in structs for name in struct.__struct_fields__}
    names |= {*native_body.UNSUPPORTED, *native_body.UNSUPPORTED_SAMPLING}
    names |= {*native_body.IGNORED_SAMPLING, *openai_body.IGNORED, *openai_body.UNSUPPORTED}
    assert sorted(name for name in names if f"`{name}`" not in PAGE) == []
