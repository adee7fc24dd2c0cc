"""Into which works a profile looks, and when."""

import argparse

import pytest

import dovetail
from benchmarks import gpu_profile
from benchmarks.gpu_profile import StepLog, lines_of


def test_each_work_is_looked_into_once_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The works, cut short, on a CPU; what a look would find there is where the engine stands."""
    with dovetail.Engine(max_running=8, prefix_cache=False) as engine:
        logs = []

        class Log(StepLog):
            def __init__(self, engine: dovetail.Engine) -> None:
                super().__init__(engine)
                logs.append(self)

        def look(seconds: float) -> dict[str, object]:
            return {"seconds": seconds, "newest": logs[0].steps[-gpu_profile.SETTLED :]}

        monkeypatch.setattr(gpu_profile, "StepLog", Log)
        monkeypatch.setattr(gpu_profile, "kernels_during", look)
        monkeypatch.setattr(gpu_profile, "LONG", 120)
        monkeypatch.setattr(gpu_profile, "prompts_of_c", lambda: [[5] * 60] * 2)
        monkeypatch.setattr(gpu_profile, "work_a", lambda: ([[5] * 30, [6] * 9], [40, 20]))
        args = argparse.Namespace(works=["b", "c", "a"], batches=[1, 4], at=[0.0, 0.01], window=0.1)
        lines = list(lines_of(engine, args))
    assert [line["work"] for line in lines] == [
        "b: kernels, 1 rows", "b: kernels, 4 rows", "c: kernels", "a: kernels at 0 s",
        "a: kernels at 0.01 s", "a: steps",
    ]  # fmt: skip
    for line in lines[:2]:
        newest = line["newest"]
        assert len(newest) == gpu_profile.SETTLED
        assert all((rows, tokens) == (line["batch"], 0) for _, rows, tokens in newest)
    assert lines[2]["seconds"] == gpu_profile.C_SECONDS and lines[3]["seconds"] == 0.1
    steps = lines[-1]["steps"]
    assert sum(kind["steps"] for kind in steps) >= 39 and lines[-1]["value"] > 0
