"""The ledger against naive sets, and against a memory that remembers who wrote a page."""

import itertools
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.cache.groups import PagedGroup
from dovetail.cache.ledger import Holding, KVLedger
from dovetail.cache.radix import Edge, Node
from dovetail.errors import InvariantError

# The tokens of each page are all the same, and mostly 0, so that prefixes often meet.
namespaces = st.sampled_from([b"a", b"a", b"a", b""])
values = st.sampled_from([0, 0, 0, 1])
which = st.integers(0, 99)
pages_and_tokens = st.tuples(st.integers(0, 2), st.integers(0, 15))


@dataclass(eq=False)
class Run:
    """What the test knows of a running sequence."""

    holding: Holding
    namespace: bytes
    tokens: list[int]
    num_computed: int
    tables: list[list[int]]
    shareable: bool = True
    published: list[Edge] = field(default_factory=list)


def prefix_of(node: Node) -> Edge:
    """Spell the prefix that ends in a node, from the edges alone."""
    prefix: Edge = ()
    while node.parent is not None:
        prefix = node.edge + prefix
        node = node.parent
    return prefix


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.runs: list[Run] = []
        self.known: dict[Edge, tuple[int, ...]] = {}
        self.let_go_at: dict[Edge, int] = {}
        self.clock = itertools.count()
        self.num_evictions = 0

    @initialize(
        page_size=st.sampled_from([1, 2, 16]),
        num_pages=st.lists(st.integers(6, 14), min_size=1, max_size=2),
    )
    def start(self, page_size: int, num_pages: list[int]):
        self.page_size = page_size
        self.num_pages = num_pages
        groups = tuple(PagedGroup(f"g{index}", page_size) for index in range(len(num_pages)))
        self.ledger = KVLedger(groups, num_pages)
        self.memory: list[dict[int, Edge]] = [{} for _ in num_pages]

    # -- the naive rules ------------------------------------------------------------

    def amount(self, pages_and_tokens: tuple[int, int]) -> int:
        """So many pages and part of one, in tokens."""
        pages, tokens = pages_and_tokens
        return pages * self.page_size + tokens % self.page_size

    def prefixes(self, namespace: bytes, tokens: list[int], end: int) -> list[Edge]:
        """One prefix for each full page: its KV depends on the namespace and all tokens so far."""
        ends = range(self.page_size, min(end, len(tokens)) + 1, self.page_size)
        return [(namespace, *tokens[:end]) for end in ends]

    def matched(self, namespace: bytes, tokens: list[int], max_cached: int) -> list[Edge]:
        prefixes = self.prefixes(namespace, tokens, max_cached)
        return list(itertools.takewhile(self.known.__contains__, prefixes))

    def pinned(self) -> set[Edge]:
        return {prefix for run in self.runs for prefix in run.published}

    def live_pages(self, group: int) -> set[int]:
        pages = {page for run in self.runs for page in run.tables[group]}
        return pages | {pages[group] for pages in self.known.values()}

    def num_free(self, group: int) -> int:
        return self.num_pages[group] - len(self.live_pages(group))

    def num_missing(self, num_pages: int, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.page_size) - num_pages)

    def fits(self, num_missing: int, spared: set[Edge]) -> bool:
        num_evictable = len(self.known.keys() - self.pinned() - spared)
        free = min(map(self.num_free, range(len(self.num_pages))))
        return num_missing <= free + num_evictable

    def evict_oldest(self):
        pinned = self.pinned()
        parents = {prefix[: -self.page_size] for prefix in self.known}
        leaves = [p for p in self.known if p not in pinned and p not in parents]
        del self.known[min(leaves, key=lambda prefix: self.let_go_at[prefix])]
        self.num_evictions += 1

    def extend(self, run: Run, num_tokens: int, expected: bool):
        """Extend by the ledger and by the naive rule: new pages must have been nobody's."""
        assert self.ledger.can_extend(run.holding, num_tokens) == expected
        assert self.ledger.extend(run.holding, num_tokens) == expected
        num_missing = self.num_missing(len(run.tables[0]), num_tokens)
        if expected:
            while min(map(self.num_free, range(len(self.num_pages)))) < num_missing:
                self.evict_oldest()
        for group, table in enumerate(run.tables):
            seen = self.ledger.table(run.holding, group)
            new = seen[len(table) :]
            assert seen[: len(table)] == table
            assert len(new) == num_missing * expected
            assert self.live_pages(group).isdisjoint(new)
            table += new
            for page in new:
                self.memory[group].pop(page, None)

    def end(self, run: Run):
        self.ledger.release(run.holding)
        self.runs.remove(run)
        self.let_go_at |= dict.fromkeys(run.published, next(self.clock))
        with pytest.raises(InvariantError):
            self.ledger.release(run.holding)

    # -- what a scheduler does ------------------------------------------------------

    @rule(
        ns=namespaces,
        page_values=st.lists(values, max_size=3),
        rest=st.integers(0, 15),
        uncached=st.just((0, 1)) | pages_and_tokens,
        room=pages_and_tokens,
        compute=st.booleans(),
    )
    def open(
        self,
        ns: bytes,
        page_values: list[int],
        rest: int,
        uncached: tuple[int, int],
        room: tuple[int, int],
        compute: bool,
    ):
        tokens = [value for value in page_values for _ in range(self.page_size)]
        tokens += [0] * (rest % self.page_size)
        self.begin(ns, tokens, self.amount(uncached), self.amount(room), compute)

    @precondition(lambda self: self.runs)
    @rule(index=which, cached=st.booleans(), room=pages_and_tokens, compute=st.booleans())
    def fork(self, index: int, cached: bool, room: tuple[int, int], compute: bool):
        """A second sequence with the tokens of the first: they may compute the same pages."""
        run = self.runs[index % len(self.runs)]
        uncached = 1 if cached else len(run.tokens)
        self.begin(run.namespace, list(run.tokens), uncached, self.amount(room), compute)

    @precondition(lambda self: self.runs)
    @rule(index=which, compute=st.booleans())
    def retract(self, index: int, compute: bool):
        run = self.runs[index % len(self.runs)]
        self.end(run)
        self.begin(run.namespace, run.tokens, 1, 1, compute)

    def begin(self, ns: bytes, tokens: list[int], uncached: int, room: int, compute: bool):
        """Open and extend as admission does; release again if there was too little room."""
        max_cached, num_tokens = len(tokens) - uncached, len(tokens) + room
        matched = self.matched(ns, tokens, max_cached)
        cached_len = len(matched) * self.page_size
        fits = self.fits(self.num_missing(len(matched), num_tokens), set(matched))
        assert self.ledger.match_len(ns, tokens, max_cached=max_cached) == cached_len
        assert fits == self.ledger.can_open(
            ns, tokens, max_cached=max_cached, num_tokens=num_tokens
        )
        holding = self.ledger.open(ns, tokens, max_cached=max_cached)
        assert holding.cached_len == cached_len
        tables = [[self.known[p][g] for p in matched] for g in range(len(self.num_pages))]
        assert list(holding.tables) == tables
        run = Run(holding, ns, tokens, cached_len, tables, published=matched)
        self.runs.append(run)
        self.extend(run, num_tokens, fits)
        if not fits:
            self.end(run)
        elif compute:
            self.compute_and_publish(run, len(tokens))

    @precondition(lambda self: self.runs)
    @rule(index=which, value=values, more=pages_and_tokens)
    def grow(self, index: int, value: int, more: tuple[int, int]):
        run = self.runs[index % len(self.runs)]
        num_tokens = len(run.tokens) + self.amount(more)
        fits = self.fits(self.num_missing(len(run.tables[0]), num_tokens), set())
        self.extend(run, num_tokens, fits)
        if fits:
            run.tokens += [value] * self.amount(more)

    @precondition(lambda self: self.runs)
    @rule(index=which, most=st.just((9, 0)) | pages_and_tokens)
    def compute(self, index: int, most: tuple[int, int]):
        self.compute_and_publish(self.runs[index % len(self.runs)], self.amount(most))

    def compute_and_publish(self, run: Run, most: int):
        capacity = len(run.tables[0]) * self.page_size
        first = run.num_computed // self.page_size
        run.num_computed = min(len(run.tokens), capacity, run.num_computed + most)
        prefixes = self.prefixes(run.namespace, run.tokens, run.num_computed)
        for group, table in enumerate(run.tables):
            for page, prefix in zip(table[first:], prefixes[first:], strict=False):
                # A page that is written to is nobody else's.
                assert sum(page in other.tables[group] for other in self.runs) == 1
                assert all(page != pages[group] for pages in self.known.values())
                self.memory[group][page] = prefix
        known_tokens = run.tokens[: run.num_computed]
        self.ledger.publish(run.holding, known_tokens, run.num_computed)
        if run.shareable:
            run.published = prefixes
            for prefix, *pages in zip(prefixes, *run.tables, strict=False):
                self.known.setdefault(prefix, tuple(pages))

    @precondition(lambda self: self.runs)
    @rule(index=which)
    def unshareable(self, index: int):
        run = self.runs[index % len(self.runs)]
        self.ledger.unshareable(run.holding)
        run.shareable = False

    @precondition(lambda self: self.runs)
    @rule(index=which)
    def release(self, index: int):
        self.end(self.runs[index % len(self.runs)])

    @precondition(lambda self: len(self.known) > 3)
    @rule()
    def flush(self):
        self.ledger.flush()
        self.known.clear()
        for run in self.runs:
            run.shareable = False
            run.published = []

    @precondition(lambda self: self.runs)
    @rule(index=which)
    def forget(self, index: int):
        run = self.runs[index % len(self.runs)]
        self.ledger.forget(run.holding)
        run.shareable = False
        if not run.published:
            return
        first = run.published[0]
        self.known = {p: pages for p, pages in self.known.items() if p[: len(first)] != first}
        for other in self.runs:
            if other.published[:1] == [first]:
                other.shareable = False
                other.published = []

    # -- what must always be so -----------------------------------------------------

    @invariant()
    def books_balance(self):
        self.ledger.check()
        assert {prefix_of(node): node.pages for node in self.ledger._tree.nodes()} == self.known
        stats = self.ledger.stats()
        groups = range(len(self.num_pages))
        assert stats.total == sum(self.num_pages)
        assert stats.free == sum(map(self.num_free, groups))
        assert stats.evictable == len(self.known.keys() - self.pinned()) * len(groups)
        assert stats.held == stats.total - stats.free - stats.evictable
        assert stats.evictions == self.num_evictions
        evictable = stats.evictable // len(groups)
        assert self.ledger.num_available == min(map(self.num_free, groups)) + evictable

    @invariant()
    def pages_hold_what_they_are_read_for(self):
        for group, memory in enumerate(self.memory):
            for prefix, pages in self.known.items():
                assert memory[pages[group]] == prefix
            for run in self.runs:
                table = self.ledger.table(run.holding, group)
                assert table == run.tables[group]
                prefixes = self.prefixes(run.namespace, run.tokens, run.num_computed)
                for page, prefix in zip(table, prefixes, strict=False):
                    assert memory[page] == prefix

    def teardown(self):
        if not hasattr(self, "ledger"):
            return
        for run in list(self.runs):
            self.end(run)
        self.ledger.flush()
        self.ledger.check()
        assert self.ledger.stats().free == sum(self.num_pages)


LedgerMachine.TestCase.settings = settings(deadline=None, max_examples=250, stateful_step_count=50)
TestKVLedger = LedgerMachine.TestCase
