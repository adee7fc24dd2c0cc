"""Does capture work on this very executor? Asked once, before anybody is served.

Owns a short request that goes through the chosen backends: a prompt over a page border, a few
decode steps, a read-out. A backend that writes nothing, or something else than it stores, is found
here and not in a trainer. Leaves nothing behind that a later request could see.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from dovetail.cache.groups import PagedGroup
from dovetail.cache.ledger import KVLedger
from dovetail.config.schema import EngineConfig
from dovetail.errors import ConfigError
from dovetail.exec.pending import StepExecutor
from dovetail.sched.scheduler import Scheduler
from dovetail.wire.request import CaptureParams, Request, SamplingParams
from dovetail.wire.result import TokenEvent

NUM_TOKENS = 3
Column = NDArray[np.generic]


def check_capture_works(executor: StepExecutor, config: EngineConfig) -> None:
    """Run a request and compare what is read back with what left each of its steps.

    Raises:
        ConfigError: a row was never written, is not what its router chose, or is no legal value.
    """
    prompt_len = max(1, min(config.page_size + 3, config.context_len - NUM_TOKENS))
    request = Request(
        request_id=0,
        prompt_token_ids=tuple(i % config.model.vocab_size for i in range(prompt_len)),
        sampling=SamplingParams(max_new_tokens=NUM_TOKENS - 1, temperature=0.0, ignore_eos=True),
        seed=0,
        capture=CaptureParams(columns=config.capture),
    )
    last, snapshots = _run(executor, config, request)
    if last.finish is None or last.finish.type != "length" or last.captured is None:
        raise _refusal(f"{last.finish and last.finish.message}")
    for column in config.capture:
        rows = last.captured[column].rows.unpack()
        left = np.concatenate([snapshot[column] for snapshot in snapshots])
        if not np.array_equal(rows, left):
            raise _refusal(f"column {column} does not come back as it was written")
    if "experts" in config.capture:
        _check_experts(last.captured["experts"].rows.unpack(), config)


def _run(
    executor: StepExecutor, config: EngineConfig, request: Request
) -> tuple[TokenEvent, list[dict[str, Column]]]:
    """Run a request, one step at a time; return its last event and what left each step."""
    group = PagedGroup(name="paged", page_size=config.page_size)
    ledger = KVLedger((group,), (config.num_pages,))
    scheduler = Scheduler(config, ledger, token_bytes=lambda _: b"")
    scheduler.add(request)
    snapshots: list[dict[str, Column]] = []
    while True:
        plan = scheduler.plan()
        assert plan is not None
        if len(plan.rows):
            plan = dataclasses.replace(plan, snapshot=config.capture)
        pending = executor.submit(plan)
        events = scheduler.commit_readouts(plan, pending.readouts()) if plan.readouts else []
        result = pending.result()
        if len(plan.rows):
            snapshots.append(result.snapshot)
        for event in (*events, *scheduler.commit(plan, result)):
            if event.finish is not None:
                return event, snapshots


def _check_experts(rows: Column, config: EngineConfig) -> None:
    assert config.model.moe is not None
    ordered = np.sort(rows, axis=-1)
    if int(ordered.max()) >= config.model.moe.num_experts:
        raise _refusal("an expert id is larger than there are experts")
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise _refusal("a row names one expert twice")


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        "capture",
        f"the self-test failed: {what}; leave out --capture, or report this model and device",
    )
