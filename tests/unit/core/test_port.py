"""How an engine's state is told."""

import pytest

from dovetail.core.port import health_of
from dovetail.errors import EngineClosed


@pytest.mark.parametrize(
    ("failure", "turn_age_s", "state", "reason"),
    [
        (None, 0.4, "alive", ""),
        (None, 5.0, "alive", ""),
        (None, 5.25, "stalled", "no turn of the loop for 5.2 s"),
        (EngineClosed("lost the device"), 0.0, "dead", "lost the device"),
        (EngineClosed("lost the device"), 99.0, "dead", "lost the device"),
    ],
)
def test_health(failure, turn_age_s, state, reason):
    health = health_of(failure, turn_age_s=turn_age_s, timeout_s=5.0)
    assert (health.state, health.reason) == (state, reason)
