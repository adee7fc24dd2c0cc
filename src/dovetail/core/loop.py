"""The engine loop: take messages, plan, submit, commit.

Owns the order of things and nothing else. ``depth`` steps may be in flight while the
next one is planned; 0 is synchronous and 1 is overlap, with the same code.
"""

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext

from dovetail.core.control import MAX_VERSION, Refit
from dovetail.core.mailbox import Inbox, Outbox
from dovetail.errors import EngineClosed, EngineError, RequestError
from dovetail.exec.pending import PendingStep, StepExecutor
from dovetail.sched.scheduler import Scheduler
from dovetail.wire.control import Abort, AbortGroup, Admit, Close, Message


class EngineLoop:
    """Runs one scheduler against one executor. One thread calls ``run``.

    ``turned_at`` is when the last turn began (``time.monotonic``); idle turns count, so on a loop
    that works it is never old.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        inbox: Inbox,
        outbox: Outbox,
        depth: int,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.inbox = inbox
        self.outbox = outbox
        self.depth = depth
        self.inflight: deque[PendingStep] = deque()
        self.is_closing = False
        self.turned_at = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """True if only a message can bring work."""
        return not self.inflight and self.scheduler.num_open == 0 and not self.is_closing

    def run(self, thread: AbstractContextManager[None] | None = None) -> None:
        """Step until closed. Whatever ends the loop, every open request gets its answer.

        Args:
            thread: what the calling thread needs to be for this, entered and left here.
        """
        failure: EngineError = EngineClosed("the engine has been closed")
        try:
            with thread or nullcontext():
                while not (self.is_closing and self.scheduler.num_open == 0 and not self.inflight):
                    self.step()
        except Exception as error:  # the loop is the process's last line: answer, then end
            failure = EngineClosed(f"the engine failed: {error!r}")
            failure.__cause__ = error
        finally:
            try:
                self.executor.close()
            finally:
                self.outbox.close(failure)

    def step(self) -> None:
        """Do one turn of the loop."""
        self.turned_at = time.monotonic()
        for message in self.inbox.take(wait=self.is_idle):
            self.apply(message)
        plan = self.scheduler.plan()
        if plan is not None:
            self.inflight.append(self.executor.submit(plan))
        if len(self.inflight) > self.depth or (plan is None and self.inflight):
            self._commit_oldest()

    def _commit_oldest(self) -> None:
        pending = self.inflight.popleft()
        if pending.plan.readouts:  # there before the forward is: answers need not wait for it
            self.outbox.put(self.scheduler.commit_readouts(pending.plan, pending.readouts()))
        self.outbox.put(self.scheduler.commit(pending.plan, pending.result()))

    def apply(self, message: Message | Refit) -> None:
        """Let one message take effect, between two steps."""
        match message:
            case Admit(request):
                self.scheduler.add(request)
                if self.is_closing:
                    self.outbox.put(self.scheduler.abort(request.request_id))
            case Abort(request_id):
                self.outbox.put(self.scheduler.abort(request_id))
            case AbortGroup(group):
                self.outbox.put(self.scheduler.abort_group(group))
            case Refit():
                self._refit(message)
            case Close():
                self.is_closing = True
                self.outbox.put(self.scheduler.abort_all())

    def _refit(self, message: Refit) -> None:
        """Change weights between two steps; who runs goes on under the new ones, from its tokens.

        What was computed of them is given up, so nothing is ever computed of two versions.
        """
        epoch = self.scheduler.epoch
        version = epoch + 1 if message.version is None else message.version
        if version <= epoch:
            message.done.set_exception(
                RequestError(
                    "version", f"is {version}, and {epoch} is served; give a larger one, or none"
                )
            )
            return
        if version > MAX_VERSION:
            message.done.set_exception(
                RequestError("version", f"{epoch} is served, and no version is larger; start anew")
            )
            return
        self._drain()
        self.executor.update(message.install)
        self.scheduler.begin_epoch(version)
        message.done.set_result(version)

    def _drain(self) -> None:
        """Commit what is in flight, then let everybody's memory go, rows that are due first."""
        while self.inflight:
            self._commit_oldest()
        self.scheduler.retract_all()
        while (plan := self.scheduler.plan_leaving()) is not None:
            self.turned_at = time.monotonic()
            self.inflight.append(self.executor.submit(plan))
            self._commit_oldest()
