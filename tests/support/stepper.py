"""The engine without its thread: a test steps the loop itself, so every run is the same run.

After each step the ledger's conservation law is checked; at the end nothing may be left behind.
Imports no torch: what runs the plans is given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dovetail.cache.groups import PagedGroup
from dovetail.cache.ledger import KVLedger
from dovetail.config.schema import EngineConfig
from dovetail.core.loop import EngineLoop
from dovetail.core.mailbox import Inbox, Outbox
from dovetail.exec.pending import StepExecutor
from dovetail.sched.scheduler import Scheduler
from dovetail.wire.control import Abort, Admit
from dovetail.wire.request import (
    Limits,
    Request,
    SamplingParams,
    validated_prompt,
    validated_sampling,
)
from dovetail.wire.result import FinishReason, TokenEvent, Usage

MAX_STEPS = 4_000


@dataclass
class Output:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    usage: Usage | None = None
    captured: dict[str, np.ndarray] = field(default_factory=dict)
    num_events: int = 0


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
        self.on_step: Callable[[int], None] | None = None
        self.num_steps = 0

    def add(
        self, prompt_token_ids: Sequence[int], *, capture: Sequence[str] = (), **sampling: object
    ) -> int:
        """Queue a request and return its id."""
        limits = Limits(
            vocab_size=self.config.model.vocab_size, context_len=self.config.context_len
        )
        prompt = validated_prompt(prompt_token_ids, limits)
        request_id = len(self.outputs)
        params = validated_sampling(
            SamplingParams(**sampling), prompt_len=len(prompt), limits=limits
        )
        output = self.outputs[request_id] = Output()

        def deliver(event: TokenEvent | Exception) -> None:
            assert isinstance(event, TokenEvent), event
            assert output.finish is None, "an event after the last one"
            output.num_events += 1
            output.token_ids += event.token_ids
            output.logprobs += event.logprobs
            output.finish, output.usage = event.finish, event.usage
            if event.captured:
                output.captured = {k: v.unpack() for k, v in event.captured.items()}

        self.outbox.open(request_id, deliver)
        self.inbox.put(
            Admit(
                Request(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    sampling=params,
                    seed=params.sampling_seed or 0,
                    capture=tuple(capture),
                )
            )
        )
        return request_id

    def abort(self, request_id: int) -> None:
        """Ask for an abort; it takes effect before the next step."""
        self.inbox.put(Abort(request_id))

    @property
    def is_busy(self) -> bool:
        """True while a request is open or a step is in flight."""
        return any(o.finish is None for o in self.outputs.values()) or bool(self.loop.inflight)

    def step(self) -> None:
        """Do one turn of the loop and check the ledger."""
        assert self.num_steps < MAX_STEPS, "the engine makes no progress"
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
        """Every page is free or cached, no sequence is known, every request has ended once."""
        stats = self.ledger.stats()
        assert stats.held == 0, stats
        assert self.scheduler.num_open == self.scheduler.num_running == 0
        assert self.scheduler.num_waiting == 0
        for output in self.outputs.values():
            assert output.finish is not None and output.usage is not None
            assert len(output.token_ids) == len(output.logprobs) == output.usage.completion_tokens

    def close(self) -> None:
        """End the device."""
        self.executor.close()
