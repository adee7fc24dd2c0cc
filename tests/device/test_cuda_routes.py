"""The reports about captured rows again, on a GPU: through graphs, their padding and its lanes."""

import pytest

from tests.engine import test_bug_routes as reports
from tests.engine.test_bug_routes import (  # noqa: F401  collected here, too
    test_b01_every_forwarded_token_has_a_row,
    test_b03_no_row_of_an_earlier_step_is_repeated,
    test_b05_a_prompt_may_be_longer_than_any_batch_of_decodes,
    test_b09_prompt_rows_of_a_hit_are_there,
    test_b11_slots_are_not_reused_before_they_are_read,
    test_b13_rows_of_the_retracted_are_those_of_a_large_pool,
    test_b15_turns_join_without_gap_or_overlap,
    test_rows_of_one_aborted_while_it_waits_for_memory_again_are_there,
    test_weights_are_those_of_the_same_choice,
)
from tests.support.gpu_engine import gpu_harness

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "Harness", gpu_harness)
