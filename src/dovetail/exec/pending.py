"""A plan in flight. No torch here: the fake executor shares these types."""

from collections.abc import Callable
from typing import Protocol

from dovetail.errors import InvariantError
from dovetail.sched.plan import ReadRows, StepPlan, StepResult


class PendingStep:
    """A submitted plan and the one way to its result.

    Args:
        plan: what was submitted.
        collect: waits for the step and returns its result; called once.
        read: waits for the read-outs, which come before the forward, and returns their rows; called
            once, and before ``collect``, if the plan has any.
    """

    def __init__(
        self, plan: StepPlan, collect: Callable[[], StepResult], read: Callable[[], ReadRows]
    ) -> None:
        self.plan = plan
        self._collect: Callable[[], StepResult] | None = collect
        self._read = read if plan.readouts else None

    def readouts(self) -> ReadRows:
        """Wait for the read-outs and return their rows, while the forward may still run.

        Raises:
            DeviceError: the device failed.
            InvariantError: the rows have been taken already, or the plan reads nothing.
        """
        read, self._read = self._read, None
        if read is None:
            raise InvariantError(f"step {self.plan.step_id} has no rows that were not taken")
        return read()

    def result(self) -> StepResult:
        """Wait for the step and return what it produced. Callable once.

        Raises:
            DeviceError: the device failed.
            InvariantError: the result has been taken already, or the rows that were read have not.
        """
        if self._read is not None:
            raise InvariantError(f"the rows that step {self.plan.step_id} read are taken first")
        collect, self._collect = self._collect, None
        if collect is None:
            raise InvariantError(f"the result of step {self.plan.step_id} was taken twice")
        return collect()


class StepExecutor(Protocol):
    """Whoever can run plans."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a plan; never waits for its forward."""
        ...

    def update(self, work: Callable[[], None]) -> None:
        """Run work that writes the model's parameters, with no step in flight; waits for it."""
        ...

    def close(self) -> None:
        """Let go of the device."""
        ...
