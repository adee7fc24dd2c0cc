"""``dovetail trace``: what host and device do in some decode steps, as a trace and a picture.

Owns which steps are looked at and what is said of them. The trace is in Chrome's format, which
https://ui.perfetto.dev shows as well.

Two shares of time say how idle a device is. ``lane idle`` is 1 - busy time of the compute lane /
time from step to step; a lane is busy from the beginning of a work to its end, pauses between the
kernels of one work included. ``GPU idle`` is 1 - time of the recorded graph / time from step to
step, so all that a step launches beside its graph counts as idle.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dovetail.cli.options import engine_options
from dovetail.cli.progress import starting_bars
from dovetail.cli.timeline import draw_timeline, load_pillow, row_of
from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineConfig
from dovetail.core.engine import Engine
from dovetail.errors import RequestError
from dovetail.exec.cuda.clock import CudaClock
from dovetail.exec.cuda.device import CudaDevice
from dovetail.exec.device import CpuDevice, Device
from dovetail.exec.executor import Executor
from dovetail.exec.gpu import find_gpu
from dovetail.exec.pending import PendingStep
from dovetail.exec.trace import HostClock, Recorder, Span, note_lanes
from dovetail.sched.plan import FROM_DEVICE, StepPlan
from dovetail.wire.request import SamplingParams

SKIPPED = 8
"""Steady steps before the first that is shown: by then the loop runs as it will."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Some steps and all that was noted of them.

    Attributes:
        spans: of these steps alone.
        step_s: from a step's first work on the compute lane to that of the next.
        busy_s: of the compute lane, by step.
        graph_s: of the recorded graph on it, by step; 0 where none was replayed.
        host_s: planning, submitting and committing, by step; not waiting.
    """

    spans: list[Span]
    step_s: list[float]
    busy_s: list[float]
    graph_s: list[float]
    host_s: list[float]

    @property
    def lane_idle(self) -> float:
        """The share of time in which the compute lane had nothing to do."""
        return max(0.0, 1 - sum(self.busy_s) / sum(self.step_s))

    @property
    def gpu_idle(self) -> float | None:
        """The share of time in which no graph ran; None if steps ran without one."""
        return max(0.0, 1 - sum(self.graph_s) / sum(self.step_s)) if all(self.graph_s) else None


class Tracer:
    """An engine whose loop is noted; make it, generate, then ask for the steps."""

    def __init__(self, options: dict[str, Any]) -> None:
        config = resolve(options_from(options), find_gpu())
        device, self.recorder = noted_device(config)
        with starting_bars() as on_progress:
            self.engine = Engine(on_progress=on_progress, on_device=device, **options)
        self.plans: dict[int, StepPlan] = {}
        loop = self.engine.port.loop
        self._plan, self._submit = loop.scheduler.plan, loop.executor.submit
        note = self.recorder.call
        # The loop's thread waits for a first message: nobody calls these yet.
        loop.scheduler.plan = note("plan", self._next_plan)
        loop.executor.submit = note("submit", self._next_submit)
        loop.scheduler.commit = note("commit", loop.scheduler.commit)
        loop.scheduler.commit_readouts = note("commit", loop.scheduler.commit_readouts)
        graphs = loop.executor.graphs if isinstance(loop.executor, Executor) else None
        if graphs is not None:
            graphs.replay = self.recorder.replay(graphs.replay)

    def _next_plan(self) -> StepPlan | None:
        plan = self._plan()
        if plan is not None:
            self.recorder.step += 1
            self.plans[self.recorder.step] = plan
        return plan

    def _next_submit(self, plan: StepPlan) -> PendingStep:
        pending = self._submit(plan)
        return PendingStep(
            plan,
            self.recorder.call("wait", pending.result),
            self.recorder.call("wait", pending.readouts),
        )

    def steps(self, num_steps: int, num_rows: int) -> Steps:
        """Return steady decode steps in the middle of the run.

        Raises:
            RequestError: there were not so many.
        """
        steady = [
            number
            for number, plan in self.plans.items()
            if len(plan.rows) == num_rows and (plan.rows.start == FROM_DEVICE).all()
        ]
        return summarise(self.recorder.spans(), steps_in_a_row(steady, num_steps))


def steps_in_a_row(steady: Sequence[int], num_steps: int) -> Sequence[int]:
    """Return the numbers of so many steps, and of the one after them.

    Raises:
        RequestError: there are not so many, or another kind of step came in between.
    """
    shown = steady[SKIPPED : SKIPPED + num_steps + 1]
    if len(shown) <= num_steps or shown[-1] - shown[0] != num_steps:
        raise RequestError(
            "--steps",
            f"{num_steps} decode steps of all rows did not come in a row; raise --kv-memory or "
            "--max-running, or lower --batch",
        )
    return shown


def noted_device(config: EngineConfig) -> tuple[Device, Recorder[Any]]:
    """Return the configured device with its lanes noted, and the notes."""
    device: Device = CudaDevice() if config.device == "cuda" else CpuDevice()
    recorder: Recorder[Any] = Recorder(CudaClock() if config.device == "cuda" else HostClock())
    note_lanes(device, recorder)
    return device, recorder


def summarise(spans: Iterable[Span], steps: Sequence[int]) -> Steps:
    """Return what is to be said of some steps; the last of them only ends the one before."""
    by_step: dict[int, list[Span]] = {step: [] for step in steps}
    for span in spans:
        if span.step in by_step:
            by_step[span.step].append(span)

    def of(row: str, step: int) -> list[Span]:
        return [span for span in by_step[step] if span.row == row]

    begins = [min(span.begin_s for span in of("compute", step)) for step in steps]
    shown = [span for step in steps[:-1] for span in by_step[step]]
    return Steps(
        spans=shown,
        step_s=np.diff(begins).tolist(),
        busy_s=[_seconds(of("compute", step)) for step in steps[:-1]],
        graph_s=[_seconds(of("graph", step)) for step in steps[:-1]],
        host_s=[
            _seconds(s for s in by_step[step] if s.row == "host" and s.name != "wait")
            for step in steps[:-1]
        ],
    )


def told(steps: Steps) -> str:
    """Say what steps took: medians, and shares of all their time."""
    parts = [
        f"{1e3 * median(steps.step_s):.3f} ms a step",
        f"compute lane {1e3 * median(steps.busy_s):.3f} ms",
        f"host {1e3 * median(steps.host_s):.3f} ms",
        f"lane idle {steps.lane_idle:.1%}",
    ]
    if steps.gpu_idle is not None:
        parts.insert(2, f"graph {1e3 * median(steps.graph_s):.3f} ms")
        parts.append(f"GPU idle {steps.gpu_idle:.1%} (1 - graph / step)")
    return ", ".join(parts)


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Return spans in Chrome's trace format: a thread for each row, times in microseconds."""
    rows = sorted({row_of(span) for span in spans}, key=lambda row: (not row.startswith("h"), row))
    first_s = min(span.begin_s for span in spans)
    names = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": row}}
        for number, row in enumerate(rows)
    ]
    events = [
        {
            "ph": "X", "pid": 0, "tid": rows.index(row_of(span)), "name": span.name,
            "ts": round(1e6 * (span.begin_s - first_s), 3),
            "dur": round(1e6 * (span.end_s - span.begin_s), 3), "args": {"step": span.step},
        }
        for span in spans
    ]  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def check_writable(flag: str, file: Path) -> None:
    """Refuse a file that cannot be written; leave it, and its absence, as they are.

    Raises:
        RequestError: names the flag.
    """
    with writing(flag, file):
        was_there = file.exists()
        file.open("ab").close()
        if not was_there:
            file.unlink()


@contextmanager
def writing(flag: str, file: Path) -> Iterator[None]:
    """Name the flag if its file cannot be written."""
    try:
        yield
    except OSError as error:
        raise RequestError(flag, f"cannot write {file}: {error.strerror}") from None


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    # Before anything is loaded: what cannot be kept need not be measured.
    check_writable("--out", args.out)
    if args.png is not None:
        check_writable("--png", args.png)
        load_pillow()
    options = engine_options(args)
    options.setdefault("max_running", max(args.batch, 128))
    options.setdefault("prefix_cache", False)
    tracer = Tracer(options)
    with tracer.engine as engine:
        rng = np.random.default_rng(0)
        prompts = rng.integers(
            0, engine.config.model.vocab_size, (args.batch, args.input_len)
        ).tolist()
        # Those that came first go on until the last has been steady for long enough.
        num_chunks = -(-args.batch * args.input_len // engine.config.chunk_size)
        num_tokens = 2 * SKIPPED + args.steps + num_chunks
        engine.generate(
            prompts, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, sampling_seed=0)
        )
    steps = tracer.steps(args.steps, args.batch)
    said = (
        f"{args.steps} decode steps of {args.batch} rows on {engine.config.device}: {told(steps)}"
    )
    with writing("--out", args.out):
        args.out.write_text(json.dumps(chrome_trace(steps.spans)), encoding="utf-8")
    print(said)
    print(f"trace: {args.out} (open it at https://ui.perfetto.dev)")
    if args.png is not None:
        with writing("--png", args.png):
            draw_timeline(steps.spans, said, args.png)
        print(f"picture: {args.png}")
    return 0


def _seconds(spans: Iterable[Span]) -> float:
    return sum(span.end_s - span.begin_s for span in spans)
