"""The engine without its thread: a test steps the loop itself, so every run is the same run.

After each step the ledger's conservation law is checked; at the end nothing may be left behind.
Imports no torch: what runs the plans is given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.cache.groups import PagedGroup
from dovetail.cache.ledger import KVLedger
from dovetail.config.schema import EngineConfig
from dovetail.core.loop import EngineLoop
from dovetail.core.mailbox import Inbox, News, Outbox
from dovetail.core.prompts import Capture, capture_of
from dovetail.exec.pending import StepExecutor
from dovetail.sched.plan import StepPlan
from dovetail.sched.scheduler import Scheduler
from dovetail.wire.capture import CapturedRows, CaptureSpan
from dovetail.wire.control import Abort, AbortGroup, Admit
from dovetail.wire.request import LogprobParams, Request, SamplingParams
from dovetail.wire.result import FinishReason, Scores, TokenEvent, Usage
from dovetail.wire.validate import (
    Limits,
    validated_capture,
    validated_logprobs,
    validated_prompt,
    validated_sampling,
)

MAX_STEPS = 4_000
"""After the newest request was added."""


@dataclass
class Output:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    usage: Usage | None = None
    captured: dict[str, np.ndarray] = field(default_factory=dict)
    spans: dict[str, tuple[CaptureSpan, ...]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    scores: list[Scores] = field(default_factory=list)
    prompt_scores: Scores | None = None
    num_events: int = 0

    def add(self, event: TokenEvent) -> None:
        """Take in an event, of which none may follow the last one."""
        assert self.finish is None, "an event after the last one"
        self.num_events += 1
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.finish, self.usage = event.finish, event.usage
        if event.scores is not None:
            self.scores.append(event.scores)
        if event.prompt_scores is not None:
            assert self.prompt_scores is None
            self.prompt_scores = event.prompt_scores
        if event.captured:
            self.add_captured(event.captured)

    def add_captured(self, columns: dict[str, CapturedRows]) -> None:
        """Append rows, which must go on where the last ones ended."""
        for name, part in columns.items():
            rows = part.rows.unpack()
            before = self.captured.get(name, rows[:0])
            if name in self.starts:
                assert part.start == self.starts[name] + len(before), "a gap, or rows twice"
            self.starts.setdefault(name, part.start)
            self.captured[name] = np.concatenate([before, rows])
            self.spans[name] = part.spans

    @property
    def top(self) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """For each token, the likeliest ids and their logprobs."""
        return [
            pair
            for part in self.scores
            for pair in zip(part.top_ids, part.top_logprobs, strict=True)
        ]

    @property
    def id_logprobs(self) -> list[tuple[float, ...]]:
        """For each token, the logprobs of the ids asked for."""
        return [row for part in self.scores for row in part.id_logprobs]


class Stepper:
    """One scheduler, one executor and one loop, stepped by hand."""

    def __init__(
        self,
        config: EngineConfig,
        executor: StepExecutor,
        *,
        token_bytes: Callable[[int], bytes],
        special_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.config, self.executor = config, executor
        self.ledger = KVLedger(
            (PagedGroup(name="paged", page_size=config.page_size),), (config.num_pages,)
        )
        self.scheduler = Scheduler(
            config, self.ledger, token_bytes=token_bytes, special_ids=special_ids
        )
        self.inbox, self.outbox = Inbox(), Outbox()
        self.loop = EngineLoop(
            self.scheduler, executor, inbox=self.inbox, outbox=self.outbox, depth=config.depth
        )
        self.outputs: dict[int, Output] = {}
        self.samples: dict[int, list[Output]] = {}
        self.on_step: Callable[[int], None] | None = None
        self.num_steps = 0
        self.step_of_newest = 0
        self.num_forwarded = 0
        self._plan = self.scheduler.plan
        self.scheduler.plan = self._counted_plan  # type: ignore[method-assign]

    def add(
        self,
        prompt_token_ids: Sequence[int],
        *,
        capture: Capture = (),
        logprobs: LogprobParams | None = None,
        group: str | None = None,
        priority: int = 0,
        is_streamed: bool = True,
        **sampling: object,
    ) -> int:
        """Queue a request and return its id.

        ``outputs`` has its first generation, ``samples`` all ``n`` of them.
        """
        limits = Limits(
            vocab_size=self.config.model.vocab_size,
            context_len=self.config.context_len,
            columns=tuple(self.config.columns),
        )
        prompt = validated_prompt(prompt_token_ids, limits)
        request_id = len(self.outputs)
        params = validated_sampling(
            SamplingParams(**sampling), prompt_len=len(prompt), limits=limits
        )
        outputs = self.samples[request_id] = [Output() for _ in range(params.n)]
        self.outputs[request_id] = outputs[0]

        def deliver(news: News) -> None:
            assert not isinstance(news, Exception), news
            for event in news:
                outputs[event.sample_index].add(event)

        self.step_of_newest = self.num_steps
        self.outbox.open(request_id, deliver, num_samples=params.n)
        self.inbox.put(
            Admit(
                Request(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    sampling=params,
                    seed=params.sampling_seed or 0,
                    logprobs=validated_logprobs(
                        logprobs or LogprobParams(), prompt_len=len(prompt), limits=limits
                    ),
                    group=group,
                    priority=priority,
                    capture=validated_capture(
                        capture_of(capture), prompt_len=len(prompt), limits=limits
                    ),
                    is_streamed=is_streamed,
                )
            )
        )
        return request_id

    def ask(self, prompt_token_ids: Sequence[int], **fields: Any) -> Output:
        """Add a request, run until all have ended, and return its first generation."""
        request_id = self.add(prompt_token_ids, **fields)
        return self.run()[request_id]

    def _counted_plan(self) -> StepPlan | None:
        plan = self._plan()
        self.num_forwarded += 0 if plan is None else plan.num_tokens
        return plan

    def abort(self, request_id: int) -> None:
        """Ask for an abort; it takes effect before the next step."""
        self.inbox.put(Abort(request_id))

    def abort_group(self, group: str) -> None:
        """Ask for an abort of all that carry a label."""
        self.inbox.put(AbortGroup(group))

    @property
    def all_outputs(self) -> list[Output]:
        """Every generation of every request."""
        return [output for samples in self.samples.values() for output in samples]

    @property
    def is_busy(self) -> bool:
        """True while a generation is open or a step is in flight."""
        return bool(self.loop.inflight) or any(o.finish is None for o in self.all_outputs)

    def step(self) -> None:
        """Do one turn of the loop and check the ledger."""
        assert self.num_steps - self.step_of_newest < MAX_STEPS, "the engine makes no progress"
        self.loop.step()
        self.ledger.check()
        self.num_steps += 1
        if self.on_step is not None:
            self.on_step(self.num_steps)

    def run(self) -> dict[int, Output]:
        """Step until every request has ended, then check that nothing is left behind."""
        while self.is_busy:
            self.step()
        self.check_idle()
        return self.outputs

    def check_idle(self) -> None:
        """Every page is free or cached, no sequence is known, every generation has ended once."""
        stats = self.ledger.stats()
        assert stats.held == 0, stats
        assert self.scheduler.num_open == self.scheduler.num_running == 0
        assert self.scheduler.num_waiting == 0
        for output in self.all_outputs:
            assert output.finish is not None and output.usage is not None
            assert len(output.token_ids) == len(output.logprobs) == output.usage.completion_tokens

    def close(self) -> None:
        """End the device."""
        self.executor.close()
