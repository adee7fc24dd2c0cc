"""FX-STAMP: a model whose answers tell in which step they were computed.

Deterministic arithmetic hides a row that was computed again and written over: the numbers are the
same. Here they are not: a logprob is a stamp, the number of the forward that it comes from. So a
token, a score or a prompt score that is not the first and only one of its kind shows at once.
Expert rows are stamped in the same way: ``test_stamped_routes.py``.
"""

import numpy as np
import pytest

from dovetail.errors import InvariantError
from dovetail.exec.device import CpuDevice
from dovetail.exec.executor import Executor
from dovetail.exec.pending import PendingStep
from dovetail.exec.runner import StepRunner
from dovetail.sched import progress
from dovetail.sched.plan import StepPlan
from dovetail.sched.scheduler import Scheduler
from dovetail.sched.sequence import Sequence
from dovetail.wire.request import LogprobParams
from tests.support.referee import check_append_only
from tests.support.scripted import plain_config
from tests.support.stamps import StampModel, after, stamp_of
from tests.support.stepper import Output, Stepper

TOP = LogprobParams(logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=(0, 31))


class Stamped(Stepper):
    """An engine on the stamp model that writes down who was forwarded and drawn when."""

    def __init__(self, **options: object) -> None:
        config = plain_config(context_len=64, **options)
        self.model = StampModel(config.model)
        super().__init__(
            config,
            Executor(config, StepRunner(config, self.model, CpuDevice()), CpuDevice()),
            token_bytes=lambda _: b"",
        )
        self.loop.executor = self
        self.num_plans = 0
        self.look_every = 1
        self._seen: dict[Sequence, dict[str, list]] = {}

    def submit(self, plan: StepPlan) -> PendingStep:
        """Pass a plan on; a plan of read-outs alone runs no forward."""
        pending = self.executor.submit(plan)
        self.num_plans += len(plan.rows) > 0
        assert self.model.num_forwards == self.num_plans
        return pending

    def step(self) -> None:
        super().step()
        for sequence in self.scheduler._open.sequences():
            if self.num_steps % self.look_every:
                continue  # a look at a record lets it take what waits
            check_append_only(sequence, self._seen.setdefault(sequence, {}))


def check_stamps(output: Output, prompt: list[int]) -> None:
    """Tokens are right, and each number about a token is of the one forward that drew it."""
    count = len(output.token_ids)
    assert output.token_ids == [after(len(prompt) - 1 + i) for i in range(count)]
    stamps = [stamp_of(x) for x in output.logprobs]
    assert stamps == sorted(set(stamps)), "two tokens of one forward, or an older one"
    for i, (ids, values) in enumerate(output.top):
        assert ids[0] == output.token_ids[i]
        assert stamp_of(values[0]) == stamps[i]
        assert stamp_of(values[1], is_drawn=False) == stamps[i]
    for i, values in enumerate(output.id_logprobs):
        ids = (0, 31)
        for token_id, value in zip(ids, values, strict=True):
            assert stamp_of(value, is_drawn=token_id == output.token_ids[i]) == stamps[i]
    scores = output.prompt_scores
    assert scores is not None and len(scores.logprobs) == len(prompt) - 1
    prompt_stamps = [
        stamp_of(x, is_drawn=token == after(position))
        for position, (x, token) in enumerate(zip(scores.logprobs, prompt[1:], strict=True))
    ]
    assert prompt_stamps == sorted(prompt_stamps), "scored again"
    assert prompt_stamps == [stamp_of(values[0]) for values in scores.top_logprobs]
    assert not stamps or max(prompt_stamps, default=0) <= stamps[0]


@pytest.mark.parametrize("retract_every", [0, 3, 7])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_nothing_that_left_a_forward_is_ever_written_over(depth, retract_every):
    engine = Stamped(depth=depth, page_size=4, num_pages=40, chunk_size=7, max_running=5)
    rng = np.random.default_rng(depth)
    prompts = [rng.integers(3, 30, rng.integers(2, 24)).tolist() for _ in range(10)]
    for i, prompt in enumerate(prompts):
        engine.add(
            prompt,
            logprobs=TOP,
            max_new_tokens=20 + i,
            ignore_eos=True,
            temperature=0.0,
            n=1 + i % 2,
        )
    first_seen: dict[tuple[int, int], list[float]] = {}

    def retract(step: int) -> None:
        for request_id, samples in engine.samples.items():
            for index, output in enumerate(samples):
                seen = first_seen.setdefault((request_id, index), [])
                assert output.logprobs[: len(seen)] == seen
                seen[:] = output.logprobs
        if retract_every and step % retract_every == 0 and step < 90:
            engine.scheduler.retract_last()

    engine.on_step = retract
    engine.run()
    retractions = sum(o.usage.num_retractions for o in engine.all_outputs)
    assert retractions >= (5 if retract_every else 0)
    for request_id, prompt in enumerate(prompts):
        for output in engine.samples[request_id]:
            check_stamps(output, prompt)


def test_stamps_are_of_the_forwards_that_drew():
    """Without retraction the stamps are known: the fixture stamps what it is taken to stamp."""
    engine = Stamped(depth=0, chunk_size=8, num_pages=16, max_payload_bytes=1 << 20)
    prompt = list(range(3, 15))
    output = engine.ask(prompt, logprobs=TOP, max_new_tokens=5, ignore_eos=True, temperature=0.0)
    assert [stamp_of(x) for x in output.logprobs] == [2, 3, 4, 5, 6]
    check_stamps(output, prompt)
    assert output.usage.completion_tokens == 5 and engine.num_plans == 6


@pytest.mark.parametrize("retract_every", [0, 7])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_that_wait_are_of_the_forwards_that_drew(depth, retract_every, monkeypatch):
    """Nobody looks at a record before its end, and a few tokens at a time wait for each."""
    monkeypatch.setattr(progress, "MOST_NEW", 4)
    engine = Stamped(
        depth=depth, page_size=4, num_pages=60, chunk_size=9, max_running=6, prefix_cache=False
    )
    engine.look_every = 1000
    prompts = [list(range(3, 4 + i)) for i in range(9)]
    for i, prompt in enumerate(prompts):
        engine.add(
            prompt, max_new_tokens=20 + 3 * i, ignore_eos=True, temperature=0.0, is_streamed=i > 3
        )
    seen: dict[int, list[int]] = {}  # the forwards that drew for each request
    submit = engine.executor.submit

    def note(plan: StepPlan) -> PendingStep:
        for slot, generation, samples in zip(
            *(getattr(plan.rows, name).tolist() for name in ("slot", "generation", "samples")),
            strict=True,
        ):
            if samples:
                request_id = engine.scheduler._slots.tenant(slot, generation).request.request_id
                seen.setdefault(request_id, []).append(engine.num_plans + 1)
        return submit(plan)

    engine.executor.submit = note

    def retract(step: int) -> None:
        if retract_every and step % retract_every == 0 and step < 60:
            engine.scheduler.retract_last()

    engine.on_step = retract
    for request_id, output in engine.run().items():
        count = 20 + 3 * request_id
        start = len(prompts[request_id]) - 1
        assert output.token_ids == [after(start + i) for i in range(count)]
        assert [stamp_of(x) for x in output.logprobs] == seen[request_id]


def test_tokens_that_wait_and_are_lost_are_noticed(monkeypatch):
    original = Scheduler._retract

    def retract(self, sequence):
        self._progress._num_new[sequence.slot] = 0
        original(self, sequence)

    monkeypatch.setattr(Scheduler, "_retract", retract)
    with pytest.raises(AssertionError):
        test_tokens_that_wait_are_of_the_forwards_that_drew(0, 7, monkeypatch)


def keep_and_recompute(original):
    """A retraction that throws the newest tokens away, to draw them again."""

    def forget_memory(self):
        original(self)
        record = self.record
        for column in (record.token_ids, record.logprobs, record.epochs, record.scores):
            del column[self.num_emitted - 1 :]
        del self.known_ids[self.prompt_len + len(record) :]
        self.num_emitted = len(record)

    return forget_memory


def rewrite_at_commit(original):
    """A commit that brings an older token's logprob up to date."""

    def append(self, token_id, logprob, epoch, scores):
        original(self, token_id, logprob, epoch, scores)
        if self.num_retractions and len(self.record) > 1:
            self.record.logprobs[-2] = logprob

    return append


def score_prompts_again(original):
    def forget_memory(self):
        original(self)
        self.scored = self.planned_score = 1
        self.prompt_scores.clear()

    return forget_memory


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("forget_memory", keep_and_recompute),
        ("append", rewrite_at_commit),
        ("forget_memory", score_prompts_again),
    ],
)
def test_a_record_that_is_rewritten_is_noticed(name, mutant, monkeypatch):
    monkeypatch.setattr(Sequence, name, mutant(getattr(Sequence, name)))
    with pytest.raises(AssertionError):
        for retract_every in (2, 3, 5):
            test_nothing_that_left_a_forward_is_ever_written_over(1, retract_every)


# -- results that come late or twice ----------------------------------------------------------


def flying(depth: int) -> tuple[Stamped, PendingStep]:
    """An engine and its oldest step in flight."""
    engine = Stamped(depth=depth, num_pages=16)
    engine.add([3, 4, 5], max_new_tokens=30, ignore_eos=True, temperature=0.0)
    for _ in range(4):
        engine.step()
    return engine, engine.loop.inflight[0]


def test_a_result_is_committed_once():
    engine, pending = flying(2)
    result = pending.result()
    with pytest.raises(InvariantError, match="taken twice"):
        pending.result()
    engine.scheduler.commit(pending.plan, result)
    with pytest.raises(InvariantError, match="to be committed"):
        engine.scheduler.commit(pending.plan, result)


def test_results_are_committed_in_order():
    engine, _ = flying(2)
    second = engine.loop.inflight[1]
    with pytest.raises(InvariantError, match="to be committed"):
        engine.scheduler.commit(second.plan, second.result())


def test_a_plan_for_a_tenant_that_left_is_refused_by_scheduler_and_device():
    engine, pending = flying(1)
    old_plan = pending.plan
    engine.abort(0)
    engine.run()
    engine.add([6, 7], max_new_tokens=30, ignore_eos=True, temperature=0.0)
    for _ in range(3):
        engine.step()
    tenant = int(old_plan.rows.slot[0]), int(old_plan.rows.generation[0])
    with pytest.raises(InvariantError, match="stale"):
        engine.scheduler._slots.tenant(*tenant)
    with pytest.raises(InvariantError, match="stale"):
        engine.executor.submit(old_plan).result()


def test_a_commit_that_is_not_checked_would_go_unnoticed():
    """What the order check is for: without it a result that comes twice doubles a token."""
    engine, pending = flying(2)
    result, scheduler = pending.result(), engine.scheduler
    scheduler.commit(pending.plan, result)
    before = len(scheduler._open.sequences()[0].record)
    scheduler._order._num_results -= 1
    scheduler.commit(pending.plan, result)
    assert len(scheduler._open.sequences()[0].record) == before + 1
