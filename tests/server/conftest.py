"""One server of the embedded model for all modules that ask, and the same engine beside it."""

from collections.abc import Iterator

import pytest

from dovetail import Engine
from tests.support.server import Server, start_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with start_server("--num-pages", "1024") as made:
        yield made


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with Engine(num_pages=1024) as made:
        yield made
