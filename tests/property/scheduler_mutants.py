"""The scheduler with one rule broken, for ``test_scheduler``: ``MUTANTS`` says which, by name.

Each function here makes the broken part from the original. Imports no torch.
"""

from collections.abc import Callable

import numpy as np
import pytest

from dovetail.cache.ledger import KVLedger
from dovetail.core.mailbox import Outbox
from dovetail.sched import builder as builder_module
from dovetail.sched import scheduler as scheduler_module
from dovetail.sched.admission import PrefixHolds
from dovetail.sched.builder import PlanBuilder
from dovetail.sched.finish import ABORTED
from dovetail.sched.plan import FROM_DEVICE, ROW_FIELDS
from dovetail.sched.progress import NEVER, Progress
from dovetail.sched.running import RunningSequences
from dovetail.sched.scheduler import Scheduler
from dovetail.sched.sequence import Sequence, SequenceState, TokenRecord
from dovetail.sched.slots import SlotTable


def wrap(owner: type, name: str, make: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutant that replaces ``owner.name`` by ``make(original)``."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def release_before_the_last_step_retires(original):
    def decide_finish(self, sequence, reason):
        events = original(self, sequence, reason)
        if sequence.holding is not None:
            self._ledger.release(sequence.holding)
            sequence.holding = self._ledger.open(b"", [], max_cached=0)
        return events

    return decide_finish


def publish_before_commit(original):
    def plan_chunk(self, builder, sequence, budget):
        width = original(self, builder, sequence, budget)
        self._ledger.publish(sequence.holding, sequence.known_ids, sequence.planned_len)
        return width

    return plan_chunk


def forget_what_is_in_flight(original):
    return property(lambda self: self.request.max_new_tokens - self.num_generated)


def requeue_nowhere(original):
    def requeue(self, sequence):
        self._give_up_memory(sequence)
        sequence.state = SequenceState.WAITING

    return requeue


def retract_the_oldest(original):
    return property(lambda self: next(iter(self), None))


def keep_pages_at_retraction(original):
    def start(self, holding, epoch):
        original(self, holding, epoch)
        if self.num_retractions:
            self.planned_len = self.computed_len = self.known_len - 1

    return start


def forget_the_record_at_retraction(original):
    def forget_memory(self):
        original(self)
        self._known_ids = list(self.request.prompt_token_ids)
        self._record = TokenRecord()

    return forget_memory


def leak_at_retraction(original):
    def requeue(self, sequence):
        self._ledger.open(b"", sequence.known_ids, max_cached=len(sequence.known_ids))
        original(self, sequence)

    return requeue


def tell_only_the_first_pages(original):
    def add_pages(self, sequence):
        if sequence.num_pages_sent == [0]:
            original(self, sequence)

    return add_pages


def commit_surplus_rows(original):
    def commit(self, plan, result):
        for sequence in self._leaving:
            if sequence.state is SequenceState.FINISHING and sequence.num_inflight:
                sequence.append(0, 0.0, 0, None)
        return original(self, plan, result)

    return commit


def abort_what_has_finished(original):
    def finish_open(self, sequences):
        events = []
        for sequence in sequences:
            if sequence.finish is not None and sequence.num_inflight == 0:
                sequence.finish = ABORTED
                events.append(self._end(sequence))
        return events + original(self, sequences)

    return finish_open


def finish_twice(original):
    def finish_open(self, sequences):
        for sequence in sequences:
            sequence.finish = None
        return original(self, sequences)

    return finish_open


def one_last_event_for_all_samples(original):
    def end(self, sequence):
        event = original(self, sequence)
        self._open._sequences.pop(sequence.request.request_id, None)
        return event

    return end


def forget_the_label(original):
    def end(self, sequence):
        if sequence.request.group is not None:
            self._open._groups[sequence.request.group].add(-1)
        return original(self, sequence)

    return end


def keep_old_pages(original):
    def begin_epoch(self, epoch):
        flush, self._ledger.flush = self._ledger.flush, lambda: None
        original(self, epoch)
        self._ledger.flush = flush

    return begin_epoch


def read_nothing(original):
    return lambda self: None


def score_again_after_retraction(original):
    def forget_memory(self):
        original(self)
        self.planned_score = 1

    return forget_memory


def lose_scores_in_flight(original):
    def retract(self):
        victim = original(self)
        if victim is not None:
            victim.scored = victim.planned_score
        return victim

    return retract


def prompt_scores_with_every_event(original):
    def news_of(sequence):
        emitted = sequence.num_emitted
        sequence.num_emitted = 0
        news = original(sequence)
        return type(news)(
            **{name: getattr(news, name) for name in news.__struct_fields__}
            | {name: getattr(news, name)[emitted:] for name in ("token_ids", "logprobs", "epochs")}
        )

    return news_of


def shift_the_targets(original):
    def build(self, **ids):
        self._targets = self._targets[1:] + self._targets[:1]
        return original(self, **ids)

    return build


def all_samples_alike(original):
    def slot_writes(tenants):
        writes = original(tenants)
        return type(writes)(
            **{name: getattr(writes, name) for name in writes.__slots__}
            | {"sample_index": np.zeros_like(writes.sample_index)}
        )

    return slot_writes


def hand_scores_to_the_neighbour(original):
    def commit(self, plan, result):
        sampled = original(self, plan, result)
        return {row: sampled[other] for row, other in zip(sampled, reversed(sampled), strict=True)}

    return commit


def reuse_the_whole_prompt(original):
    def open_holding(self, namespace, token_ids, *, max_cached):
        return original(self, namespace, token_ids, max_cached=max_cached and max_cached + 1)

    return open_holding


def prefill_first(original):
    def rows_of(self):
        rows = original(self)
        order = np.argsort(rows.start == FROM_DEVICE, kind="stable")
        return type(rows)(**{name: getattr(rows, name)[order] for name in ROW_FIELDS})

    return rows_of


def promise_no_room(original):
    def extend(self, sequence, num_tokens):
        return original(self, sequence, num_tokens - 1)

    return extend


def decode_while_leaving(original):
    def retract(self):
        victim = original(self)
        if victim is not None and victim.state is SequenceState.RETRACTING:
            victim.state = SequenceState.RUNNING
        return victim

    return retract


def look_for_no_end_ids(original):
    def needs_look(self, *rows):
        self._num_end_rows = 0
        return original(self, *rows)

    return needs_look


def look_for_no_length(original):
    def look_when_committed(self):
        original(self)
        if self._progress.commit_look_at[self.slot]:
            self._progress.commit_look_at[self.slot] = NEVER

    return look_when_committed


def keep_nothing_up(original):
    def look_when_committed(self):
        original(self)
        self._progress.upkeep_at[self.slot] = NEVER

    return look_when_committed


def tell_again_what_waited(original):
    def catch_up(self):
        emitted = self.num_emitted
        original(self)
        self.num_emitted = emitted

    return catch_up


def hand_tokens_to_the_neighbour(original):
    def commit_one(self, slots, token_ids, logprobs, epoch):
        return original(self, slots, token_ids[::-1], logprobs, epoch)

    return commit_one


MUTANTS = {
    "release at finish, without waiting": wrap(
        Scheduler, "_decide_finish", release_before_the_last_step_retires
    ),
    "sampled tokens in flight are forgotten": wrap(
        Sequence, "samples_left", forget_what_is_in_flight
    ),
    "publish before commit": wrap(Scheduler, "_plan_chunk", publish_before_commit),
    "retract without requeue": wrap(Scheduler, "_requeue", requeue_nowhere),
    "admit beyond the slots": wrap(SlotTable, "num_free", lambda _: property(lambda self: 1)),
    "retract the oldest": wrap(RunningSequences, "last", retract_the_oldest),
    "a retracted one goes on as if": wrap(Sequence, "start", keep_pages_at_retraction),
    "retraction restarts": wrap(Sequence, "forget_memory", forget_the_record_at_retraction),
    "retraction leaks": wrap(Scheduler, "_requeue", leak_at_retraction),
    "new pages are not told": wrap(PlanBuilder, "add_pages", tell_only_the_first_pages),
    "surplus tokens are kept": wrap(Scheduler, "commit", commit_surplus_rows),
    "abort after the end": wrap(Scheduler, "_finish_open", abort_what_has_finished),
    "abort again": wrap(Scheduler, "_finish_open", finish_twice),
    "one last event for all samples": wrap(Scheduler, "_end", one_last_event_for_all_samples),
    "labels are kept": wrap(Scheduler, "_end", forget_the_label),
    "streams are kept": wrap(Outbox, "_end_one", lambda _: lambda self, request_id: None),
    "a prefill holds others for ever": wrap(PrefixHolds, "remove", lambda _: lambda self, s: None),
    "prompts are scored again after a retraction": wrap(
        Sequence, "forget_memory", score_again_after_retraction
    ),
    "scores in flight are lost at a retraction": wrap(
        Scheduler, "retract_last", lose_scores_in_flight
    ),
    "a hit of tokens that are to be scored": wrap(
        Sequence, "max_cached_len", lambda _: property(lambda self: self.known_len - 1)
    ),
    "scores of another row": wrap(Scheduler, "_commit_prompt_scores", hand_scores_to_the_neighbour),
    "targets of another token": wrap(PlanBuilder, "build", shift_the_targets),
    "all samples have one noise": wrap(builder_module, "_slot_writes", all_samples_alike),
    "payload without bound": wrap(PlanBuilder, "max_scored", lambda _: lambda self, s: 10**6),
    "prompt scores come again": wrap(scheduler_module, "news_of", prompt_scores_with_every_event),
    "a hit of the whole prompt": wrap(KVLedger, "open", reuse_the_whole_prompt),
    "prefill rows first": wrap(PlanBuilder, "_rows", prefill_first),
    "no page for the next token": wrap(Scheduler, "_extend", promise_no_room),
    "a retracted sequence runs on": wrap(Scheduler, "retract_last", decode_while_leaving),
    "old pages under new weights": wrap(Scheduler, "begin_epoch", keep_old_pages),
    "end ids of steady rows are passed over": wrap(Progress, "needs_look", look_for_no_end_ids),
    "lengths of steady rows are passed over": wrap(
        Sequence, "look_when_committed", look_for_no_length
    ),
    "tokens wait without end": wrap(Sequence, "look_when_committed", keep_nothing_up),
    "tokens that waited are told again": wrap(Sequence, "catch_up", tell_again_what_waited),
    "tokens wait for another": wrap(Progress, "commit_one", hand_tokens_to_the_neighbour),
    "nobody is read out for new weights": wrap(Scheduler, "plan_leaving", read_nothing),
}
