"""Which result is to be committed next.

Owns the count. A plan's rows that were read come before what its forward produced, and both before
those of the next plan.
"""

from dovetail.errors import InvariantError
from dovetail.sched.plan import ReadRows, StepPlan, StepResult


class CommitOrder:
    """The order in which results are taken. Owned by the ``Scheduler``, on the loop thread."""

    def __init__(self) -> None:
        self._num_results = 0  # steps before this one have had their results committed
        self._num_read = 0  # and these the rows that they read

    def take_rows(self, plan: StepPlan, read: ReadRows) -> None:
        """Take note that rows are committed.

        Raises:
            InvariantError: it is not their turn.
        """
        self._expect_step(plan, read.step_id)
        if plan.step_id < self._num_read:
            raise InvariantError(f"the rows that step {plan.step_id} read come a second time")
        self._num_read = plan.step_id + 1

    def take_result(self, plan: StepPlan, result: StepResult) -> None:
        """Take note that a result is committed.

        Raises:
            InvariantError: it is not its turn.
        """
        self._expect_step(plan, result.step_id)
        if plan.readouts and plan.step_id >= self._num_read:
            raise InvariantError(f"the rows that step {plan.step_id} read are committed first")
        self._num_results += 1

    def _expect_step(self, plan: StepPlan, step_id: int) -> None:
        if not plan.step_id == step_id == self._num_results:
            raise InvariantError(
                f"step {self._num_results} is to be committed, not plan {plan.step_id} with the "
                f"result of step {step_id}"
            )
