"""Who lives in slots is looked up once for rows that stay, and again for any others."""

import dataclasses

import numpy as np
import pytest

from dovetail.errors import InvariantError
from dovetail.exec.cuda.tenants import Tenants
from dovetail.sched.plan import NO_IDS, NO_PAGES, NO_TOKENS, Rows, SlotWrites, StepPlan
from tests.support.scripted import plain_config


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def rows_of(slots: np.ndarray, generations: np.ndarray) -> Rows:
    """Decode rows of these tenants."""
    ones = np.ones(len(slots), dtype=np.int32)
    return Rows(slot=slots, generation=generations, start=-ones, width=ones, samples=ones)


def newcomers(slots: list[int], *, generation: int, top_p: float = 1.0) -> StepPlan:
    """A plan with new tenants, and no rows."""
    dtypes = {"top_p": "f4", "temperature": "f4", "min_p": "f4", "seed": "u8"}
    dtypes |= {f"{kind}_penalty": "f4" for kind in ("repetition", "frequency", "presence")}
    fields = {
        field.name: np.zeros(len(slots), dtype=dtypes.get(field.name, "i4"))
        for field in dataclasses.fields(SlotWrites)
    }
    fields |= {"slot": int32(*slots), "generation": np.full(len(slots), generation, "i4")}
    fields["temperature"] += 1
    fields["repetition_penalty"] += 1
    fields["top_p"] += top_p
    return StepPlan(
        step_id=0,
        epoch=0,
        rows=rows_of(NO_IDS, NO_IDS),
        token_ids=NO_IDS,
        page_writes=NO_PAGES,
        slot_writes=SlotWrites(**fields),
        token_writes=NO_TOKENS,
    )


@pytest.fixture
def tenants() -> Tenants:
    """Tenants of generation 1 in all four slots, of which the last one truncates."""
    tenants = Tenants(plain_config(context_len=32, page_size=4, chunk_size=8, max_running=4))
    tenants.apply(newcomers([0, 1, 2], generation=1))
    tenants.apply(newcomers([3], generation=1, top_p=0.5))
    return tenants


def looks(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> list:
    """The checks from now on."""
    seen, check = [], tenants.check
    monkeypatch.setattr(tenants, "check", lambda *args: (seen.append(args), check(*args)))
    return seen


def test_the_same_rows_are_not_looked_at_again(tenants, monkeypatch):
    rows, seen = rows_of(int32(0, 3), int32(1, 1)), looks(tenants, monkeypatch)
    for _ in range(3):
        assert tenants.are_shaped(rows)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("name", "values", "is_shaped"),
    [
        ("slot", int32(0, 1), False),
        ("samples", int32(1, 0), False),
        ("generation", int32(1, 1), True),
    ],
)
def test_other_rows_are_looked_at(name, values, is_shaped, tenants, monkeypatch):
    rows, seen = rows_of(int32(0, 3), int32(1, 1)), looks(tenants, monkeypatch)
    assert tenants.are_shaped(rows)
    assert tenants.are_shaped(dataclasses.replace(rows, **{name: values})) == is_shaped
    assert len(seen) == 2


def test_the_same_rows_are_looked_at_after_newcomers(tenants):
    rows = rows_of(int32(0, 1), int32(1, 1))
    assert not tenants.are_shaped(rows)
    tenants.apply(newcomers([1], generation=2, top_p=0.5))
    with pytest.raises(InvariantError, match=r"stale slots \[1\]"):
        tenants.are_shaped(rows)
    assert tenants.are_shaped(dataclasses.replace(rows, generation=int32(1, 2)))


def test_a_stale_handle_is_refused(tenants):
    with pytest.raises(InvariantError, match=r"stale slots \[2\]"):
        tenants.are_shaped(rows_of(int32(0, 2), int32(1, 0)))
