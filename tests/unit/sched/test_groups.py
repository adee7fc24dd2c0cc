"""Requests of one group end together, and only they."""

import pytest

from tests.support.scripted_engine import scripted_engine

SAMPLING = {"max_new_tokens": 20, "ignore_eos": True}


def finishes(engine) -> dict[int, set[str]]:
    return {i: {o.finish.type for o in samples} for i, samples in engine.samples.items()}


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_a_group_ends_wherever_its_members_are(depth, steps):
    """Running, waiting, retracted, finished and several samples at once."""
    engine = scripted_engine(depth=depth, max_running=4, num_pages=40)
    done = engine.add([3] * 4, group="a", max_new_tokens=1)
    mine = [engine.add([4 + i] * 6, group="a", n=1 + i % 3, **SAMPLING) for i in range(4)]
    others = [
        engine.add([10 + i] * 6, group=group, **SAMPLING)
        for i, group in enumerate(("b", None, "", "A", "a ", "aa"))
    ]
    for _ in range(steps):
        engine.step()
    if steps > 2:
        engine.scheduler.retract_last()
    engine.abort_group("a")
    engine.abort_group("a")
    engine.abort_group("nobody")
    engine.run()
    got = finishes(engine)
    assert all(got[i] == {"abort"} for i in mine)
    assert all(got[i] == {"length"} for i in others)
    assert got[done] == ({"length"} if engine.outputs[done].token_ids else {"abort"})


def test_a_label_can_be_used_again():
    engine = scripted_engine(max_running=2)
    for _ in range(3):
        engine.add([5] * 4, group="g", **SAMPLING)
        engine.step()
        engine.abort_group("g")
        engine.run()
    late = engine.add([5] * 4, group="g", **SAMPLING)
    engine.run()
    assert finishes(engine)[late] == {"length"}


def test_members_that_come_after_the_abort_are_not_meant():
    engine = scripted_engine(max_running=4)
    early = engine.add([5] * 4, group="g", **SAMPLING)
    engine.abort_group("g")
    late = engine.add([6] * 4, group="g", **SAMPLING)
    engine.run()
    assert finishes(engine) == {early: {"abort"}, late: {"length"}}
