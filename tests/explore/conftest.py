"""The explorer's models, each with its quiz."""

from collections.abc import Callable
from functools import cache, partial

import pytest

from tests.explore.scenario import Model


@pytest.fixture(scope="session")
def model_of(request: pytest.FixtureRequest) -> Callable[[str], Model]:
    """From a model's name ("count", "tag" or "moe") to the model; made when first asked for."""

    @cache
    def model_of(name: str) -> Model:
        fixture = request.getfixturevalue
        return Model(
            name, fixture(f"fx_{name}_folder"), oracle=partial(fixture, f"fx_{name}_oracle")
        )

    return model_of
