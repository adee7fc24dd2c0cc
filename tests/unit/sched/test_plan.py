"""What a step result may hold: memory of its own."""

import mmap

import numpy as np
import pytest

from dovetail.errors import InvariantError
from dovetail.sched.plan import ReadRows, StepResult, TokenScores


def result_of(**arrays: object) -> StepResult:
    own = {
        "token_ids": np.zeros((2, 1), dtype=np.int32),
        "counts": np.ones(2, dtype=np.int32),
        "logprobs": np.zeros((2, 1), dtype=np.float32),
        "status": np.zeros(2, dtype=np.int32),
    }
    return StepResult(step_id=0, **own | arrays)


def scores_of(**arrays: object) -> TokenScores:
    own = {
        "logprobs": np.zeros(1, dtype=np.float32),
        "top_ids": np.zeros((1, 2), dtype=np.int32),
        "top_logprobs": np.zeros((1, 2), dtype=np.float32),
        "id_logprobs": np.zeros((1, 0), dtype=np.float32),
    }
    return TokenScores(**own | arrays)


def foreign(dtype: type[np.generic], *shape: int) -> np.ndarray:
    """A view of memory that is not numpy's, as views of tensors and pinned blocks are."""
    block = mmap.mmap(-1, 4096)
    return np.frombuffer(block, dtype=dtype, count=int(np.prod(shape))).reshape(shape)


def test_own_memory_and_views_of_it_are_taken():
    table = np.zeros((3, 2), dtype=np.int32)
    result = result_of(
        token_ids=table[0][:, None],
        status=table[2],
        scores=(scores_of(),),
    )
    ReadRows(step_id=0, rows=({"tokens": np.zeros(5, dtype=np.int32)},))
    assert result.token_ids.base is table and not result.token_ids.flags.writeable


@pytest.mark.parametrize(
    "arrays",
    [
        {"token_ids": foreign(np.int32, 2, 1)},
        {"logprobs": foreign(np.float32, 4, 1)[:2]},
        {"scores": (scores_of(top_ids=foreign(np.int32, 1, 2)),)},
    ],
)
def test_a_view_of_foreign_memory_is_refused(arrays):
    with pytest.raises(InvariantError, match="holds a view of foreign memory"):
        result_of(**arrays)


def test_rows_in_foreign_memory_are_refused():
    with pytest.raises(InvariantError, match="holds a view of foreign memory"):
        ReadRows(step_id=0, rows=({"tokens": foreign(np.int32, 5)},))
