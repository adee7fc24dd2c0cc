"""Each rule of the engine, switched off, is caught by the explorer: by an output or by a check.

A mutant passes its test only if it is caught for one of a few seeds, and only in the ways that are
written here; the unchanged engine passes the same seeds.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from dovetail.exec.executor import Executor
from dovetail.exec.sim import SimDevice
from tests.explore import mutants
from tests.explore.scenario import Model, check, explore, play, random_scenario

TOKENS = r"output: .*: (token \d+ .*instead of|\d+ tokens instead of)"
READOUT = r"output: \nArrays are not equal"
NO_ROW = r"output: .*has no row for position"
FOREIGN_ROWS = r"RuntimeError: generator|ValueError: operands|output: .*rows from position"
NOT_FINITE = r"output: .*not finite"
BAD_TOKEN = r"IndexError: index out of range"
PACKET = r"InvariantError: the step of packet \d+ ran on packet"
JUNK_RESULT = rf"{PACKET}|ValueError: .* is not a valid RowStatus"
JUNK_PACKET = r"(ValueError|IndexError): |InvariantError: a row writes past the pages"
NO_ROOM = r"InvariantError: \d+ tokens computed in room for \d+"
FEW_ROWS = "InvariantError: a sequence ends with rows of"
LOST_COUNT = r"AssertionError: $"
LEFT_TWICE = r"KeyError: <dovetail\.sched\.sequence\.Sequence"
STALE = r"InvariantError: (a plan names stale slots|slot .* is stale)"
FREED = r"InvariantError: audit: step .* free"
SHARED = r"InvariantError: audit: step .* writes shared"
VIEW = "InvariantError: a step result holds a view of foreign memory"
OVERLAP = {"depth": 1}


@dataclass(frozen=True)
class Mutant:
    """A mutation and how it is caught.

    Attributes:
        mutate: see ``mutants``.
        caught_by: pattern that some catch matches.
        or_by: pattern that the others match.
        model: whose quiz shows it.
        audited: whether plans are audited; without, the engine's own checks and the outputs show
            what they find alone.
        fixed: engine options.
        seeds: how many.
    """

    mutate: mutants.Mutation
    caught_by: str
    or_by: str = "$"
    model: str = "count"
    audited: bool = True
    fixed: dict[str, Any] = field(default_factory=lambda: OVERLAP)
    seeds: int = 6


MUTANTS = [
    Mutant(mutants.result_is_a_view, VIEW),
    Mutant(mutants.result_is_an_unseen_view, TOKENS, BAD_TOKEN),
    Mutant(mutants.readout_is_a_view, VIEW),
    Mutant(mutants.rows_are_read_at_once, READOUT),
    Mutant(mutants.copy_lane_reads_state, TOKENS),
    Mutant(mutants.copy_lane_declares_state, "InvariantError: lane copy touches engine state"),
    Mutant(mutants.staged_late, "ValueError: .*read-only"),
    Mutant(mutants.staged_late_unfrozen, TOKENS, READOUT),
    Mutant(mutants.copy_does_not_wait, JUNK_RESULT, READOUT),
    Mutant(mutants.retired_too_early, JUNK_RESULT, READOUT),
    Mutant(mutants.staging_has_no_fence, f"{PACKET}|{STALE}", JUNK_PACKET),
    Mutant(mutants.one_result_block, "InvariantError: a ring .* still in use"),
    Mutant(mutants.one_payload_block, "InvariantError: a ring .* still in use"),
    Mutant(mutants.payload_block_released_at_submit, READOUT),
    Mutant(mutants.tenant_not_sent, STALE, audited=False),
    Mutant(mutants.released_in_flight, FREED, STALE),
    Mutant(mutants.released_in_flight, STALE, audited=False),
    Mutant(
        mutants.stale_handle_accepted,
        NO_ROOM,
        f"{TOKENS}|{READOUT}|{FEW_ROWS}|{LOST_COUNT}|{LEFT_TWICE}|{FOREIGN_ROWS}",
        audited=False,
        fixed=OVERLAP | {"max_running": 2},
        seeds=12,
    ),
    Mutant(mutants.ended_before_its_rows, FEW_ROWS, f"{FREED}|{STALE}"),
    Mutant(mutants.read_before_the_last_row, "InvariantError: audit: Readout", READOUT),
    Mutant(mutants.read_before_the_last_row, FEW_ROWS, audited=False),
    Mutant(mutants.retracted_in_flight, STALE, audited=False),
    Mutant(mutants.pages_released_in_flight, FREED),
    Mutant(mutants.pages_released_before_the_gather, FREED),
    Mutant(mutants.published_when_planned, SHARED),
    Mutant(mutants.published_with_last_token, SHARED),
    Mutant(mutants.published_with_last_token, f"{NOT_FINITE}|{NO_ROW}", model="tag", audited=False),
    Mutant(mutants.padding_reads_strangers, NOT_FINITE, model="tag"),
]


def catches(model: Model, mutant: Mutant) -> list[str]:
    """Return how each seed that catches the mutant does so: an error, or a wrong output."""
    found = []
    for seed in range(mutant.seeds):
        scenario = random_scenario(model.quiz, seed, **mutant.fixed)
        try:
            outputs = play(scenario, model.folder, SimDevice(seed), audited=mutant.audited)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        try:
            check(scenario, model.quiz, outputs)
        except AssertionError as error:
            found.append(f"output: {error}")
    return found


@pytest.fixture(scope="module")
def healthy(model_of) -> Callable[[Mutant], Model]:
    """Return a mutant's model, after the unchanged engine has passed the mutant's seeds."""

    @cache
    def passes(name: str, seeds: int, fixed: tuple[tuple[str, Any], ...]) -> Model:
        model = model_of(name)
        for seed in range(seeds):
            scenario = random_scenario(model.quiz, seed, **dict(fixed))
            check(scenario, model.quiz, play(scenario, model.folder, SimDevice(seed)))
        return model

    return lambda mutant: passes(mutant.model, mutant.seeds, tuple(mutant.fixed.items()))


def _label(mutant: Mutant) -> str:
    return mutant.mutate.__name__ + ("" if mutant.audited else "-unaudited")


@pytest.mark.parametrize("mutant", MUTANTS, ids=_label)
def test_mutant_is_caught(mutant, healthy, monkeypatch):
    model = healthy(mutant)
    mutant.mutate(monkeypatch)
    found = catches(model, mutant)
    print(*found, sep="\n")
    right = [catch for catch in found if re.match(mutant.caught_by, catch)]
    assert right, f"the mutant lives, or is caught in another way: {found}"
    strange = [
        catch for catch in found if not re.match(f"{mutant.caught_by}|{mutant.or_by}", catch)
    ]
    assert not strange, strange


def test_one_staging_block_is_enough(model_of, monkeypatch):
    """What makes ``staging_has_no_fence`` fail is the missing fence, not the short ring."""
    mutants.one_staging_block(monkeypatch)
    num_blocks: set[int] = set()

    def look(executor: Executor, *args: Any) -> None:
        num_blocks.add(len(executor._staging._blocks))

    mutants.before(monkeypatch, Executor, "_stage", look)
    outputs = explore(model_of("count"), range(6), depth=1)  # checks them
    assert num_blocks == {1} and len(outputs) > 20
