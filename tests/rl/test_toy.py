"""The toy of the examples: what its script makes, and the one that is shipped."""

import json
from pathlib import Path

import pytest

import dovetail
import r3_mismatch
import r3_train_toy
from dovetail.replay.session import ReplaySession
from r3.rollout import sample
from r3.trainer import load_trainer


def test_the_script_makes_a_model_for_rollout_and_trainer(tmp_path, monkeypatch, capsys):
    """Stopped after three steps; what is trained is nothing, but it is the shipped one's shape."""
    monkeypatch.setattr(r3_train_toy, "WARMUP_STEPS", 2)
    folder = tmp_path / "toy"
    words = ["--out", str(folder), "--stop-loss", "100"]
    monkeypatch.setattr("sys.argv", ["r3_train_toy.py", *words])
    r3_train_toy.main()
    assert "step 3  loss" in capsys.readouterr().out
    made, shipped = (
        {name: json.loads((at / name).read_text()) for name in ("config.json", "tokenizer.json")}
        for at in (folder, Path(r3_mismatch.FOLDER))
    )
    for files in (made, shipped):
        del files["config.json"]["transformers_version"]
    assert made == shipped
    session = ReplaySession(load_trainer(folder))
    assert (session.num_experts, session.num_experts_per_tok) == (64, 2)
    assert session.layer_ids == tuple(range(10))
    with dovetail.Engine(folder, capture=("experts",)) as engine:
        samples = sample(engine, range(4), per_problem=2, seed=0)
    assert [one.trace.ids.shape[1:] for one in samples] == [(10, 2)] * 8


def test_a_loss_that_is_not_reached_saves_nothing(tmp_path, monkeypatch):
    words = ["--out", str(tmp_path / "toy"), "--max-steps", "1"]
    monkeypatch.setattr("sys.argv", ["r3_train_toy.py", *words])
    with pytest.raises(SystemExit, match=r"after 1 steps, not below 0\.5"):
        r3_train_toy.main()
    assert not (tmp_path / "toy").exists()


def test_the_shipped_toy_gets_three_in_ten_right():
    assert r3_train_toy.accuracy(load_trainer(r3_mismatch.FOLDER), count=800) == pytest.approx(
        0.3, abs=0.05
    )
