"""From the engine's rollout to a trainer's replay, end to end on the toy of the examples."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.progress import Progress

import dovetail
import grpo_r3
import r3_mismatch
from dovetail.replay.comparison import Comparison
from dovetail.replay.mismatch import Mismatch, measure_mismatch
from dovetail.replay.session import ReplaySession
from r3 import arithmetic, levels, summary
from r3.rollout import make_noisy, rounded, sample
from r3.trainer import Batch, load_trainer

TOY = r3_mismatch.FOLDER


@pytest.fixture(scope="module")
def trainer():
    return load_trainer(TOY)


@pytest.fixture(scope="module")
def session(trainer):
    return ReplaySession(trainer)


def open_engine(dtype: str = "float32") -> dovetail.Engine:
    return dovetail.Engine(TOY, dtype=dtype, capture=("experts",))


def measured(samples, trainer, session):
    """Return (k3 with live routers, k3 replayed), and the batch."""
    batch = Batch(samples)
    with torch.no_grad():
        live = batch.logprobs(trainer)
    replayed, _ = batch.replayed(trainer, session)
    counts = batch.counts > 0
    off, on = (
        measure_mismatch(logprobs[counts], batch.rollout[counts], num_resamples=2).k3
        for logprobs in (live, replayed)
    )
    return off, on, batch


def test_same_numbers_mismatch_by_rounding_alone(trainer, session):
    with open_engine() as engine:
        samples = sample(engine, range(1200, 1230), per_problem=4, seed=1)
    off, on, batch = measured(samples, trainer, session)
    assert batch.counts.sum() == sum(len(s.output) for s in samples) > 400
    assert off < 1e-9 and on < 1e-9


def test_the_tokens_are_those_of_the_trainers_distribution(trainer):
    """Replay or not: logprobs of float32 agree token by token, not on average alone."""
    with open_engine() as engine:
        samples = sample(engine, range(40, 60), per_problem=2, seed=2)
    batch = Batch(samples)
    with torch.no_grad():
        live = batch.logprobs(trainer)
    for row, one in enumerate(samples):
        at = slice(len(one.prompt) - 1, len(one.tokens) - 1)
        assert batch.counts[row].sum() == len(one.output)
        assert torch.allclose(live[row, at], torch.tensor(one.logprobs), atol=1e-4)


def test_replay_removes_noise_in_the_choice_and_nothing_else_was_noisy(trainer, session):
    with open_engine() as engine:
        make_noisy(engine, 0.1)
        samples = sample(engine, range(3000, 3060), per_problem=2, seed=3)
    off, on, batch = measured(samples, trainer, session)
    assert off > 1e-4 and on < 1e-5 * off
    wrong = r3_mismatch._rolled(batch, 1)
    shifted, _ = batch.replayed(trainer, session, wrong)
    counts = batch.counts > 0
    far = measure_mismatch(shifted[counts], batch.rollout[counts], num_resamples=2).k3
    assert far > 100 * off, "rows of the wrong tokens make no difference"


def test_own_routes_replayed_are_the_same_bits(trainer, session):
    with open_engine() as engine:
        batch = Batch(sample(engine, range(7, 27), per_problem=2, seed=4))
    with torch.no_grad(), session.record() as recording:
        live = batch.logprobs(trainer)
    replayed, routing = batch.replayed(trainer, session, recording.routes)
    assert torch.equal(live, replayed)
    assert routing.summary()["router_diff"] == 0


def test_rounded_weights_are_few_and_near(trainer):
    for bits, most in ((8, 2**8 - 1), (4, 2**4 - 1)):
        seen = dict(rounded(trainer.named_parameters(), bits))
        for name, weight in trainer.named_parameters():
            if "gate.weight" in name or "norm" in name or "embed" in name or "lm_head" in name:
                assert seen[name] is weight
        weight = dict(trainer.named_parameters())["model.layers.3.mlp.experts.down_proj"][5, 7]
        row = seen["model.layers.3.mlp.experts.down_proj"][5, 7]
        assert len(row.unique()) <= most
        assert (row - weight).abs().max() <= weight.abs().max() / (most - 1) * 1.001


def assert_drawn(path: Path, *words: str) -> None:
    """Matplotlib draws words as shapes, and leaves each as a comment."""
    text = path.read_text()
    assert text.rstrip().endswith("</svg>")
    assert [word for word in words if f"<!-- {word} -->" not in text] == []


# -- the scripts --------------------------------------------------------------------------------


def test_the_ladder_runs_and_judges(tmp_path, monkeypatch, capsys):
    report, plots = tmp_path / "report.json", tmp_path / "curves.svg"
    words = ["--tokens", "400", "--arms", "bf16", "int8", "noise 0.1", "--report", str(report)]
    words += ["--comparisons", str(tmp_path), "--plots", str(plots)]
    monkeypatch.setattr("sys.argv", ["r3_mismatch.py", *words])
    assert r3_mismatch.main() == 0
    told = json.loads(report.read_text())
    assert told["arms"]["bf16"]["off"]["num_tokens"] > 380
    verdicts = {(one["level"], one["what"]): one["passed"] for one in told["levels"]}
    assert verdicts["R0", "experts that ran are those recorded"] is True
    assert verdicts["R0", "own routes replayed: same bits"] is True
    assert verdicts["R0", "noise 0.1: k3 on / off"] is True
    assert [passed for (level, _), passed in verdicts.items() if level != "R0"] == [None] * 6
    assert "too few tokens" in capsys.readouterr().out
    assert_drawn(plots, "bf16", "int8", "noise 0.1", "replay off", "replay on")
    comparison = Comparison.load(tmp_path / "noise-0.1.mismatch")
    arm = told["arms"]["noise 0.1"]
    assert comparison.measure("live").k3 == pytest.approx(arm["off"]["k3"], rel=1e-9)
    assert comparison.measure("replayed").k3 == pytest.approx(arm["on"]["k3"], rel=1e-9)
    assert comparison.routes()["router_diff"] == pytest.approx(arm["routing"]["router_diff"])
    for one in comparison.sequences:  # the last sampled token was no input
        assert len(one.overlap) == one.start + len(one.rollout) - 1


def test_training_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """Two steps of two arms; a second call runs the seed that is new, and nothing again."""
    results, plots = tmp_path / "results.jsonl", tmp_path / "curves.svg"

    def call(*seeds: str) -> list[dict]:
        words = ["--steps", "2", "--results", str(results), "--seeds", *seeds]
        monkeypatch.setattr("sys.argv", ["grpo_r3.py", *words])
        grpo_r3.main()
        return [json.loads(line) for line in results.read_text().splitlines()]

    first = call("5")
    assert [(one["seed"], one["arm"]) for one in first] == [(5, "on"), (5, "off")]
    on, off = (one["series"] for one in first)
    # The same rollout of the same weights: the arms are paired until the first update.
    assert on["reward"][0] == off["reward"][0] and on["num_tokens"][0] == off["num_tokens"][0]
    assert on["reward"][1] != off["reward"][1], "nothing was learnt, or nothing was handed over"
    assert all(norm > 0 for norm in (*on["grad_norm"], *off["grad_norm"]))
    before = results.read_text()
    call("5")
    assert results.read_text() == before
    assert [one["seed"] for one in call("5", "6")] == [5, 5, 6, 6]
    assert "2 paired seeds; three are needed" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*sys.argv, "--summary", "--plots", str(plots)])
    grpo_r3.main()
    assert_drawn(plots, "on", "off", "gradient norm", "reward")


@pytest.mark.parametrize("arm", ["on+tis", "frozen"])
def test_other_arms_train(arm, tmp_path):
    setting = grpo_r3.Setting(TOY, steps=1, rollout="int4", mini_steps=4)
    with Progress(console=Console(quiet=True)) as progress:
        one = grpo_r3.run(setting, arm, 0, progress)
    assert one["series"]["grad_norm"][0] > 0 and one["series"]["num_tokens"][0] > 300


def test_a_frozen_router_does_not_move_and_others_do(trainer):
    setting = grpo_r3.Setting(TOY, steps=1, rollout="fp32", mini_steps=2)
    with open_engine() as engine:
        numbers = range(100, 100 + grpo_r3.PROBLEMS)
        samples = sample(engine, numbers, per_problem=grpo_r3.PER_PROBLEM, seed=1)
    before = {name: weight.clone() for name, weight in trainer.named_parameters()}
    for arm, is_moved in (("frozen", False), ("on", True)):
        learner = grpo_r3.Trainer(setting, grpo_r3.ARMS[arm])
        learner.learn(samples)
        moved = {
            name: not torch.equal(weight, before[name])
            for name, weight in learner.model.named_parameters()
        }
        assert moved["model.layers.4.mlp.gate.weight"] is is_moved
        assert moved["model.layers.4.self_attn.q_proj.weight"]


# -- pure functions -----------------------------------------------------------------------------


def mismatch_of(sizes: dict[float, int]) -> Mismatch:
    """So many tokens whose |D| is so large, spread over sequences of a hundred."""
    diff = np.concatenate([np.full(count, size) for size, count in sizes.items()])
    rng = np.random.default_rng(0)
    rollout = -2 - rng.random((len(diff) // 100, 100))
    return measure_mismatch(rollout + rng.permutation(diff).reshape(rollout.shape), rollout)


MANY = 60_000
GAP = mismatch_of({0.0: MANY - 60, 1.0: 60})


@pytest.mark.parametrize(
    ("on", "gap", "tail"),
    [
        (mismatch_of({0.0: MANY}), [True, True], True),
        (mismatch_of({0.0: MANY - 6, 1.0: 6}), [True, False], True),
        (mismatch_of({0.0: MANY - 7, 1.0: 7}), [True, False], False),
        (mismatch_of({0.0: MANY - 45, 1.0: 45}), [False, False], False),
        (mismatch_of({0.0: MANY - 120, 0.4: 120}), [True, True], True),
    ],
)
def test_levels_are_judged_by_their_conditions(on, gap, tail):
    arms = {"arm": levels.Pair(off=GAP, on=on)}
    assert [one.passed for one in levels.judge_gap(arms)] == gap
    assert [one.passed for one in levels.judge_tail(arms)] == [tail]
    [share] = [
        one.passed
        for one in levels.judge_installing(share_installed=1.0, is_own_equal=True, noisy=arms)
        if "k3" in one.what
    ]
    assert share is (on.k3 < 1e-20)
    verdicts = levels.judge_installing(share_installed=0.9999, is_own_equal=False, noisy={})
    assert [one.passed for one in verdicts] == [False, False]


def test_a_tail_that_is_rare_anyway_is_no_evidence():
    off, on = mismatch_of({0.0: MANY - 5, 1.0: 5}), mismatch_of({0.0: MANY})
    assert [one.passed for one in levels.judge_tail({"arm": levels.Pair(off, on)})] == [False]


def test_controls_must_be_far_worse():
    wrong = {"a": mismatch_of({0.0: MANY - 5900, 1.0: 5900}), "b": mismatch_of({1.0: MANY})}
    assert [one.passed for one in levels.judge_controls(GAP, wrong)] == [False, True]


def test_answers_and_rewards():
    prompt, answer = arithmetic.problem(4785)
    assert "".join(arithmetic.CHARACTERS[i] for i in prompt + answer) == "47+85=231."
    assert arithmetic.reward(answer, answer) == 1.0
    assert arithmetic.reward(answer[:3], answer) == 0.5 * 3 / 4
    assert arithmetic.reward([*answer[:2], 11, answer[3]], answer) == 0.5 * 3 / 4
    assert arithmetic.reward([], answer) == 0.0


def series(k3: float, extreme: int, largest: float, reward: list[float]) -> dict:
    steps = len(reward)
    return {
        "k3": [k3] * steps,
        "num_extreme": [extreme] * steps,
        "num_tokens": [1000] * steps,
        "max_abs": [largest] * steps,
        "grad_norm": [1.0] * (steps - 1) + [11.0],
        "reward": reward,
        "train_s": [0.1] * steps,
    }


def runs(on: tuple, off: tuple, seeds: int = 3) -> list[dict]:
    reward = [0.5] * 40
    return [
        {"arm": arm, "seed": seed, "series": series(*values, reward)}
        for seed in range(seeds)
        for arm, values in (("on", on), ("off", off))
    ]


@pytest.mark.parametrize(
    ("on", "off", "seeds", "want"),
    [
        ((4e-4, 0, 0.5), (1e-3, 1, 2.0), 3, True),
        ((4e-4, 0, 0.5), (1e-3, 1, 2.0), 2, False),
        ((6e-4, 0, 0.5), (1e-3, 1, 2.0), 3, False),
        ((4e-4, 1, 0.5), (1e-3, 1, 2.0), 3, False),
        ((4e-4, 0, 2.0), (1e-3, 1, 2.0), 3, False),
        ((4e-4, 0, 0.5), (1e-3, 0, 2.0), 3, False),
    ],
)
def test_the_level_of_training(on, off, seeds, want):
    pairs = summary.paired(runs(on, off, seeds), "on", "off")
    passed, words = summary.judge_stays_low(pairs)
    assert passed is want, words
    assert pairs[0][0].num_spikes == 1


def test_a_collapse_is_twenty_low_steps_after_a_better_time():
    assert summary.collapsed_at([0.2, *[0.5] * 10, *[0.2] * 20]) == 11
    assert summary.collapsed_at([0.2, *[0.5] * 10, *[0.2] * 19, 0.3]) is None
    assert summary.collapsed_at([*[0.2] * 30, *[0.5] * 5]) is None


def test_the_toy_is_small_and_described():
    sizes = {path.name: path.stat().st_size for path in Path(TOY).iterdir()}
    assert sizes["model.safetensors"] < 9_000_000
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= sizes.keys()
