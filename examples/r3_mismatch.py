#!/usr/bin/env python3
"""How far is a trainer from its rollout, and how much of that is routing? On a CPU, in minutes.

    python examples/r3_mismatch.py                      # all levels, 50,000 tokens an arm
    python examples/r3_mismatch.py --tokens 4000        # a look; too few to judge R1 and R2
    python examples/r3_mismatch.py --arms bf16 --comparisons .
    dovetail mismatch bf16.mismatch                     # one arm, measure by measure

The rollout is the engine; the trainer is plain Hugging Face in float32, teacher-forced. Each arm
samples answers, and the trainer computes their logprobs twice: with its own routers (off), and
through the experts that the rollout chose (on). D = log p(trainer) - log p(rollout) of a token.

    same          the engine in float32: what is left where both compute alike
    bf16          the engine in bfloat16
    int8, int4    the engine in float32, weights of attention and experts rounded to so few bits
    noise 0.03, noise 0.1   the engine in float32, noise of this size in the choice of experts alone

The last four are no options of the engine: rounded weights are what it is given (``refit``), and
noise takes the place of its model's routing operation (``examples/r3/rollout.py``).
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedModel

import dovetail
from dovetail.replay.comparison import Comparison
from dovetail.replay.live import LiveRouting
from dovetail.replay.mismatch import TAUS, Mismatch, measure_mismatch, survival
from dovetail.replay.packing import RouteBatch
from dovetail.replay.session import ReplaySession
from r3 import arithmetic, environment, levels
from r3.levels import Pair, Verdict
from r3.rollout import Sample, make_noisy, rounded, sample
from r3.trainer import Batch, chosen_problems, load_trainer

FOLDER = Path(__file__).parent / "r3" / "toy-moe"
PER_PROBLEM = 2
BATCH = 250  # sequences of one forward of the trainer
NATURAL = ("bf16", "int8")  # noise as engines have it, and small
CONTROL = "int8"  # the arm whose rows are also given to the wrong tokens


@dataclass(frozen=True, slots=True)
class Rollout:
    """How an arm's engine is made, and what is done to it before it is asked."""

    dtype: str = "float32"
    prepare: Callable[[dovetail.Engine, PreTrainedModel], object] = lambda engine, trainer: None


ROLLOUTS = {
    "same": Rollout(),
    "bf16": Rollout(dtype="bfloat16"),
    "int8": Rollout(prepare=lambda e, t: e.refit(rounded(t.named_parameters(), 8))),
    "int4": Rollout(prepare=lambda e, t: e.refit(rounded(t.named_parameters(), 4))),
    "noise 0.03": Rollout(prepare=lambda e, t: make_noisy(e, 0.03)),
    "noise 0.1": Rollout(prepare=lambda e, t: make_noisy(e, 0.1)),
}


@dataclass(slots=True)
class Scores:
    """Logprobs of the tokens of one arm, all of them sampled ones."""

    rollout: list[torch.Tensor] = field(default_factory=list)
    sequence: list[torch.Tensor] = field(default_factory=list)
    train: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    routing: list[dict[str, float]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # of each sequence, its first sampled token
    overlaps: list[torch.Tensor] = field(default_factory=list)  # [rows, layers] of each sequence

    def add(self, batch: Batch, report: LiveRouting, **train: torch.Tensor) -> None:
        counts = batch.counts > 0
        first = BATCH * len(self.rollout)
        self.rollout.append(batch.rollout[counts])
        self.sequence.append(batch.sequence[counts] + first)
        self.routing.append(report.summary())
        self.starts += (counts.int().argmax(1) + 1).tolist()
        count = len(batch.index)  # rows of the batch, which a model flattens
        rows = zip(report.overlap_NL.chunk(count), report.has_row_N.chunk(count), strict=True)
        self.overlaps += [overlap[has_row] for overlap, has_row in rows]
        for name, logprobs in train.items():
            self.train.setdefault(name, []).append(logprobs[counts])

    def mismatch(self, name: str) -> Mismatch:
        parts = self.train[name]
        return measure_mismatch(
            torch.cat(parts),
            torch.cat(self.rollout[: len(parts)]),
            sequences=torch.cat(self.sequence[: len(parts)]),
        )

    def pair(self) -> Pair:
        return Pair(off=self.mismatch("off"), on=self.mismatch("on"))

    def comparison(self, title: str, session: ReplaySession) -> Comparison:
        """Return what ``dovetail mismatch`` reads."""
        lengths = torch.cat(self.sequence).unique_consecutive(return_counts=True)[1].tolist()
        rollout, live, replayed = (
            torch.cat(parts).split(lengths)
            for parts in (self.rollout, self.train["off"], self.train["on"])
        )
        return Comparison.of_arrays(
            rollout,
            {"live": live, "replayed": replayed},
            starts=self.starts,
            overlaps=self.overlaps,
            layer_ids=session.layer_ids,
            num_experts_per_tok=session.num_experts_per_tok,
            title=title,
        )

    def mean_routing(self, name: str) -> float:
        return sum(one[name] for one in self.routing) / len(self.routing)


# -- measuring -----------------------------------------------------------------------------------


class Ladder:
    """The trainer, and what it says of each arm."""

    def __init__(self, folder: Path, *, num_tokens: int, seed: int, progress: Progress) -> None:
        self._folder = folder
        self._trainer = load_trainer(folder)
        self.session = ReplaySession(self._trainer)
        self._problems = chosen_problems(
            -(-num_tokens // (PER_PROBLEM * arithmetic.ANSWER_LEN)), seed
        )
        self._seed = seed
        self._progress = progress

    def score(self, name: str) -> tuple[Scores, list[Batch]]:
        """Sample an arm's answers, and let the trainer compute them live and replayed."""
        task = self._progress.add_task(f"{name}: rollout", total=None)
        samples = self._samples(ROLLOUTS[name])
        batches = [Batch(samples[at : at + BATCH]) for at in range(0, len(samples), BATCH)]
        scores = Scores()
        self._progress.update(task, description=f"{name}: trainer", total=len(batches))
        for batch in batches:
            with torch.no_grad():
                live = batch.logprobs(self._trainer)
            replayed, routing = batch.replayed(self._trainer, self.session)
            scores.add(batch, routing, off=live, on=replayed)
            self._progress.advance(task)
        self._progress.remove_task(task)
        return scores, batches

    def _samples(self, rollout: Rollout) -> list[Sample]:
        with dovetail.Engine(self._folder, dtype=rollout.dtype, capture=("experts",)) as engine:
            rollout.prepare(engine, self._trainer)
            return sample(engine, self._problems, per_problem=PER_PROBLEM, seed=self._seed)

    def wrong_rows(self, scores: Scores, batches: list[Batch]) -> dict[str, Mismatch]:
        """Give the rows to the wrong tokens, in three ways."""
        wrong = {"rows shifted by one": 1, "layers rolled": 2, "another sample's rows": 0}
        task = self._progress.add_task("controls", total=len(batches) * len(wrong))
        for batch in batches:
            for name, axis in wrong.items():
                routes = _rolled(batch, axis)
                logprobs, _ = batch.replayed(self._trainer, self.session, routes)
                scores.train.setdefault(name, []).append(logprobs[batch.counts > 0])
                self._progress.advance(task)
        self._progress.remove_task(task)
        return {name: scores.mismatch(name) for name in wrong}

    def is_own_equal(self, batch: Batch) -> bool:
        """Replay what the trainer itself chose; True if the logprobs are the same bits."""
        with torch.no_grad(), self.session.record() as recording:
            live = batch.logprobs(self._trainer)
        replayed, _ = batch.replayed(self._trainer, self.session, recording.routes)
        return torch.equal(live, replayed)

    def share_installed(self, batch: Batch) -> float:
        """Look at the ids that reach the experts; return the share that are the rollout's."""
        seen: list[torch.Tensor] = []

        def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.extend(a for a in (*args, *kwargs.values()) if a.dtype == torch.int64)

        experts = [m for n, m in self._trainer.named_modules() if n.endswith("mlp.experts")]
        hooks = [m.register_forward_pre_hook(look, with_kwargs=True) for m in experts]
        batch.replayed(self._trainer, self.session)
        for hook in hooks:
            hook.remove()
        ids_NLK = torch.stack(seen, dim=1)
        is_same = (ids_NLK == batch.routes.ids_NLK).all(-1)[batch.routes.has_row_N]
        return is_same.double().mean().item()


def _rolled(batch: Batch, axis: int) -> RouteBatch:
    """Roll the rows along samples (0), tokens (1) or layers (2)."""
    routes, shape = batch.routes, batch.index.shape
    step = PER_PROBLEM if axis == 0 else 1  # to a sample of another problem
    ids = routes.ids_NLK.unflatten(0, shape).roll(step, axis).flatten(0, 1).contiguous()
    has_row = routes.has_row_N.view(shape)
    if axis < 2:
        has_row = has_row & has_row.roll(step, axis)
    return replace(routes, ids_NLK=ids, has_row_N=has_row.flatten())


# -- telling -------------------------------------------------------------------------------------


def show_arms(console: Console, pairs: dict[str, Pair], scores: dict[str, Scores]) -> None:
    table = Table(title="mismatch with the trainer: routers live > replayed")
    names = ["k3", "max |D|", *(f"F({tau:g})" for tau in TAUS[1:4])]
    for name in ("rollout", "tokens", "flips: routers / tokens", *names):
        table.add_column(name, no_wrap=True)
    for name, pair in pairs.items():
        off, on = pair.off, pair.on
        routing = [scores[name].mean_routing(key) for key in ("router_diff", "token_any_diff")]
        table.add_row(
            name,
            f"{off.num_tokens:,}",
            " / ".join(f"{share:.1%}" for share in routing),
            f"{off.k3:.2e} > {on.k3:.2e}",
            f"{off.max_abs:.3f} > {on.max_abs:.3f}",
            *(f"{off.tail[tau]:.1e} > {on.tail[tau]:.1e}" for tau in TAUS[1:4]),
        )
    console.print(table)


def show_verdicts(console: Console, verdicts: Iterable[Verdict]) -> None:
    table = Table("level", "condition", "measured", "wanted", "", title="levels")
    words = {True: "[green]pass[/green]", False: "[red]FAIL[/red]", None: "too few tokens"}
    for one in verdicts:
        table.add_row(one.level, one.what, one.measured, one.wanted, words[one.passed])
    console.print(table)


def as_json(mismatch: Mismatch) -> dict[str, Any]:
    names = ("num_tokens", "num_sequences", "k1", "k2", "k3", "mean_abs", "max_abs", "chi2", "ess")
    return {name: getattr(mismatch, name) for name in names} | {
        "bit_mismatch": mismatch.bit_mismatch,
        "tail": {f"{tau:g}": share for tau, share in mismatch.tail.items()},
        "interval_k3": mismatch.intervals["k3"],
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=51_000, help="an arm, a few less as some answers end early"
    )
    parser.add_argument("--arms", nargs="+", choices=ROLLOUTS, default=list(ROLLOUTS))
    parser.add_argument("--model", type=Path, default=FOLDER, help="made by r3_train_toy.py")
    parser.add_argument("--report", type=Path, help="write all numbers there, as JSON")
    parser.add_argument(
        "--comparisons", type=Path, metavar="FOLDER", help="write ARM.mismatch of each arm there"
    )
    parser.add_argument("--plots", type=Path, help="write survival curves of |D| there, as SVG")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    most = arithmetic.NUM_PROBLEMS * PER_PROBLEM * arithmetic.ANSWER_LEN
    if not 1 <= args.tokens <= most:
        parser.error(f"--tokens is {args.tokens}; there are problems for 1 to {most}")
    if args.comparisons is not None and not args.comparisons.is_dir():
        parser.error(f"--comparisons: there is no folder {args.comparisons}; make it first")
    return args


def main() -> int:
    args, console, start = parse_args(), Console(width=150), time.monotonic()
    torch.set_num_threads(1)  # tiny matrices: more threads wait for each other
    plots = environment.load_plots(wanted=args.plots is not None)
    scores: dict[str, Scores] = {}
    verdicts: list[Verdict] = []
    wrong: dict[str, Mismatch] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        ladder = Ladder(args.model, num_tokens=args.tokens, seed=args.seed, progress=progress)
        share, is_equal = 1.0, True
        for name in progress.track(args.arms, description="arms"):
            scores[name], batches = ladder.score(name)
            share = min(share, ladder.share_installed(batches[0]))
            is_equal = is_equal and ladder.is_own_equal(batches[0])
            if name == CONTROL:
                wrong = ladder.wrong_rows(scores[name], batches)
    pairs = {name: one.pair() for name, one in scores.items()}
    noisy = {name: pair for name, pair in pairs.items() if name.startswith("noise")}
    natural = {name: pairs[name] for name in NATURAL if name in pairs}
    verdicts += levels.judge_installing(share_installed=share, is_own_equal=is_equal, noisy=noisy)
    if wrong:
        verdicts += levels.judge_controls(pairs[CONTROL].on, wrong)
    verdicts += [*levels.judge_gap(natural), *levels.judge_tail(natural)]
    show_arms(console, pairs, scores)
    show_verdicts(console, verdicts)
    seconds = {"seconds": time.monotonic() - start, "cpu_seconds": time.process_time()}
    console.print(", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    if args.report is not None:
        write_report(args.report, pairs, scores, wrong, verdicts, seconds)
        console.print(f"wrote {args.report}")
    if args.comparisons is not None:
        for name, one in scores.items():
            path = args.comparisons / f"{name.replace(' ', '-')}.mismatch"
            one.comparison(f"rollout {name}", ladder.session).save(path)
            console.print(f"wrote {path}")
    if plots is not None:
        curves = {name: _curves(one) for name, one in scores.items()}
        plots.draw_mismatch(curves, args.plots)
        console.print(f"wrote {args.plots}")
    return int(any(one.passed is False for one in verdicts))


def _curves(scores: Scores) -> tuple[Any, Any]:
    rollout = torch.cat(scores.rollout)
    off, on = (survival(torch.cat(scores.train[arm]), rollout) for arm in ("off", "on"))
    return off, on


def write_report(
    path: Path,
    pairs: dict[str, Pair],
    scores: dict[str, Scores],
    wrong: dict[str, Mismatch],
    verdicts: list[Verdict],
    seconds: dict[str, float],
) -> None:
    report = {
        **environment.describe(),
        **{name: round(value, 1) for name, value in seconds.items()},
        "arms": {
            name: {
                "off": as_json(pair.off),
                "on": as_json(pair.on),
                "routing": {
                    key: scores[name].mean_routing(key)
                    for key in ("router_diff", "token_any_diff", "layers_per_token", "coverage")
                },
            }
            for name, pair in pairs.items()
        },
        "controls": {name: as_json(mismatch) for name, mismatch in wrong.items()},
        "levels": [{name: getattr(one, name) for name in Verdict.__slots__} for one in verdicts],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
