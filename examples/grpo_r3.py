#!/usr/bin/env python3
"""Reinforcement learning with and without replayed routing, on a CPU, in minutes a run.

    python examples/grpo_r3.py                                 # replay on and off, three seeds
    python examples/grpo_r3.py --steps 20 --seeds 0 --arms on  # a look
    python examples/grpo_r3.py --summary                       # of what has been recorded

GRPO (arXiv 2402.03300) on two-digit addition, from a toy model of 64 experts, 2 a token, that gets
30 % right. The rollout is the engine in bfloat16, which is given the trainer's live parameters by
``engine.refit`` in every step; the trainer is plain Hugging Face in float32. Arms:

    on        the trainer computes through the experts that the rollout chose
    off       it chooses for itself
    on+tis, off+tis   the same with importance weights min(trainer / rollout, 2)
    frozen    off, and the routers are not trained

Runs of one seed are paired: the same problems and the same noise. A finished run is one line of the
results file; what is there is not run again, so an interrupted series goes on where it was.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

import dovetail
from dovetail.replay.mismatch import measure_mismatch
from dovetail.replay.session import ReplaySession
from dovetail.replay.weights import truncated_weights
from r3 import arithmetic, environment, summary
from r3.rollout import Sample, rounded, sample
from r3.trainer import Batch, load_trainer

FOLDER = Path(__file__).parent / "r3" / "toy-moe"
RESULTS = Path(__file__).parent / "r3" / "grpo_results.jsonl"
PROBLEMS, PER_PROBLEM = 16, 8
RATE, CLIP, TIS_CAP, MAX_GRAD_NORM = 5e-4, 0.2, 2.0, 1.0


@dataclass(frozen=True, slots=True)
class Arm:
    """What the trainer does differently."""

    replay: bool
    tis: bool = False
    frozen: bool = False


ARMS = {
    "on": Arm(replay=True),
    "off": Arm(replay=False),
    "on+tis": Arm(replay=True, tis=True),
    "off+tis": Arm(replay=False, tis=True),
    "frozen": Arm(replay=False, frozen=True),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What all arms of a comparison share."""

    model: Path
    steps: int
    rollout: str
    mini_steps: int

    def weights(self, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
        """Return what the engine is given."""
        named = model.named_parameters()
        return rounded(named, 4) if self.rollout == "int4" else named

    @property
    def engine_options(self) -> dict[str, Any]:
        return {"dtype": "bfloat16" if self.rollout == "bf16" else "float32"}


# -- the loop ------------------------------------------------------------------------------------


class Trainer:
    """A policy that learns from samples."""

    def __init__(self, setting: Setting, arm: Arm) -> None:
        self.model = load_trainer(setting.model)
        self.model.train()
        if arm.frozen:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(not name.endswith("mlp.gate.weight"))
        self._session = ReplaySession(self.model)
        self._optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=RATE,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )
        self._arm = arm
        self._mini_steps = setting.mini_steps

    def learn(self, samples: list[Sample]) -> dict[str, float]:
        """Do one step; return what it measured, mismatch before the update."""
        advantages = _advantages([_reward(s) for s in samples])
        size = len(samples) // self._mini_steps
        parts = [
            (Batch(samples[at : at + size]), advantages[at : at + size])
            for at in range(0, len(samples), size)
        ]
        before = [self._before(batch) for batch, _ in parts]
        norms = [
            self._update(batch, part, old) for (batch, part), old in zip(parts, before, strict=True)
        ]
        mismatch = measure_mismatch(
            torch.cat([old[b.counts > 0] for (b, _), old in zip(parts, before, strict=True)]),
            torch.cat([b.rollout[b.counts > 0] for b, _ in parts]),
            num_resamples=1,
        )
        return {
            "k3": mismatch.k3,
            "max_abs": mismatch.max_abs,
            "num_extreme": round(mismatch.tail[2.0] * mismatch.num_tokens),
            "num_tokens": mismatch.num_tokens,
            "grad_norm": max(norms),
        }

    @torch.no_grad()
    def _before(self, batch: Batch) -> Tensor:
        """Return the trainer's logprobs before the update."""
        if not self._arm.replay:
            return batch.logprobs(self.model)
        return batch.replayed(self.model, self._session)[0]

    def _update(self, batch: Batch, advantages: Tensor, before: Tensor) -> float:
        """Take one optimizer step; return the norm of the gradient."""
        if self._arm.replay:
            with self._session.replay(batch.routes):  # backward belongs inside
                self._loss(batch, advantages, before).backward()
        else:
            self._loss(batch, advantages, before).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _loss(self, batch: Batch, advantages: Tensor, before: Tensor) -> Tensor:
        """Return the clipped objective over sampled tokens.

        The old policy is what the rollout says of itself; with importance weights, which correct
        for that, it is the trainer before the update.
        """
        old = before if self._arm.tis else batch.rollout
        ratio = (batch.logprobs(self.model) - old).exp()
        gain = torch.minimum(
            ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None]
        )
        if self._arm.tis:
            gain = gain * truncated_weights(before, batch.rollout, batch.counts, cap=TIS_CAP)
        return -(gain * batch.counts).sum() / batch.counts.sum()


def _reward(answer: Sample) -> float:
    return arithmetic.reward(answer.output, arithmetic.problem(answer.number)[1])


def _advantages(rewards: list[float]) -> Tensor:
    """Normalise rewards among the answers of a problem."""
    grouped = torch.tensor(rewards).view(-1, PER_PROBLEM)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-6)).flatten()


def run(setting: Setting, arm: str, seed: int, progress: Progress) -> summary.Run:
    """Train one arm and return its record."""
    torch.manual_seed(seed)
    trainer, series = Trainer(setting, ARMS[arm]), {}
    task = progress.add_task(f"{arm}, seed {seed}", total=setting.steps)
    start = time.monotonic()
    with dovetail.Engine(setting.model, capture=("experts",), **setting.engine_options) as engine:
        for step in range(setting.steps):
            began = time.monotonic()
            version = engine.refit(setting.weights(trainer.model))
            refitted = time.monotonic()
            numbers = arithmetic.problems(PROBLEMS, random.Random(f"{seed} {step}"))
            samples = sample(
                engine, numbers, per_problem=PER_PROBLEM, seed=seed * setting.steps + step
            )
            assert {s.version for s in samples} == {version}
            sampled = time.monotonic()
            row = trainer.learn(samples) | {
                "reward": statistics.fmean(map(_reward, samples)),
                "refit_s": refitted - began,
                "rollout_s": sampled - refitted,
            }
            row["train_s"] = time.monotonic() - sampled
            for name, value in row.items():
                series.setdefault(name, []).append(_short(value))
            progress.update(task, advance=1, description=_status(arm, seed, row))
    progress.remove_task(task)
    return {
        "work": "grpo_r3",
        "arm": arm,
        "seed": seed,
        "rollout": setting.rollout,
        "steps": setting.steps,
        "mini_steps": setting.mini_steps,
        "seconds": round(time.monotonic() - start, 1),
        **environment.describe(),
        "series": series,
    }


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.5g}")


def _status(arm: str, seed: int, row: dict[str, float]) -> str:
    return f"{arm}, seed {seed}: reward {row['reward']:.3f}  k3 {row['k3']:.1e}"


# -- results ---------------------------------------------------------------------------------------


def recorded(path: Path, setting: Setting) -> list[summary.Run]:
    """Return the finished runs of this setting."""
    if not path.is_file():
        return []
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    keys = {"rollout": setting.rollout, "steps": setting.steps, "mini_steps": setting.mini_steps}
    return [one for one in runs if all(one[key] == value for key, value in keys.items())]


def report(console: Console, runs: list[summary.Run], setting: Setting) -> None:
    """Print a line a run, and what pairs of them say."""
    columns = ("arm", "seed", "k3 mean", "median", "first 30", "last 30", "F(2)", "max |D|")
    table = Table(
        *columns,
        "max grad",
        "reward",
        "s/step",
        title=f"{setting.rollout} rollout, {setting.steps} steps, {setting.mini_steps} mini-steps",
    )
    for one in sorted(runs, key=lambda one: (list(ARMS).index(one["arm"]), one["seed"])):
        s = summary.summarise(one)
        k3 = (s.mean_k3, s.median_k3, s.first_k3, s.last_k3)
        table.add_row(
            one["arm"],
            str(s.seed),
            *(f"{value:.1e}" for value in k3),
            f"{s.f2:.1e} ({s.num_extreme})",
            f"{s.max_abs:.2f}",
            f"{s.max_grad_norm:.1f}",
            f"{s.first_reward:.3f} > {s.last_reward:.3f}",
            f"{s.train_s:.2f}",
        )
    console.print(table)
    for on, off in (("on", "off"), ("on+tis", "off+tis"), ("on", "off+tis"), ("on", "frozen")):
        pairs = summary.paired(runs, on, off)
        if not pairs:
            continue
        console.print(
            f"[bold]{on} against {off}[/bold], {len(pairs)} paired seeds", highlight=False
        )
        if (on, off) == ("on", "off"):
            passed, words = summary.judge_stays_low(pairs)
            console.print(f"  R3, low all run: {'pass' if passed else 'FAIL'}: {words}")
        console.print(f"  R4, reported as it is: {summary.reward_words(pairs)}", highlight=False)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["on", "off"])
    parser.add_argument(
        "--rollout",
        choices=("bf16", "int4", "fp32"),
        default="bf16",
        help="the engine's numbers: bfloat16, or float32 with weights of 4 bits, or as they are",
    )
    parser.add_argument("--mini-steps", type=int, default=2, help="updates a step (2)")
    parser.add_argument("--model", type=Path, default=FOLDER, help="made by r3_train_toy.py")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines, a run a line")
    parser.add_argument("--plots", type=Path, help="write curves of all runs there, as SVG")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    args = parser.parse_args()
    if PROBLEMS % args.mini_steps:
        parser.error(f"--mini-steps is {args.mini_steps}; give a divisor of {PROBLEMS}")
    return args


def main() -> None:
    args, console = parse_args(), Console(width=150)
    torch.set_num_threads(1)  # tiny matrices: more threads wait for each other
    setting = Setting(args.model, args.steps, args.rollout, args.mini_steps)
    plots = environment.load_plots(wanted=args.plots is not None)
    done = {(one["arm"], one["seed"]) for one in recorded(args.results, setting)}
    todo = [(arm, seed) for seed in args.seeds for arm in args.arms if (arm, seed) not in done]
    if todo and not args.summary:
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            for arm, seed in progress.track(todo, description="runs"):
                one = run(setting, arm, seed, progress)
                with args.results.open("a") as file:
                    file.write(json.dumps(one) + "\n")
    runs = recorded(args.results, setting)
    report(console, runs, setting)
    if plots is not None and args.plots is not None:
        plots.draw_training(runs, args.plots)
        console.print(f"wrote {args.plots}")


if __name__ == "__main__":
    main()
