"""The prefix tree against a dict of every known prefix and a linear search."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.cache.radix import Edge, Node, RadixTree
from dovetail.errors import InvariantError

namespaces = st.sampled_from([b"", b"a"])
# The tokens of each page are all the same, so that prefixes often meet.
page_values = st.lists(st.integers(0, 1), max_size=5)


def prefix_of(node: Node) -> Edge:
    """Spell the prefix that ends in a node, from the edges alone."""
    prefix: Edge = ()
    while node.parent is not None:
        prefix = node.edge + prefix
        node = node.parent
    return prefix


class TreeMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.known: dict[Edge, tuple[int, ...]] = {}
        self.let_go_at: dict[Edge, int] = {}
        self.held: list[list[Node]] = []
        self.clock = itertools.count()
        self.fresh_page = itertools.count()

    @initialize(page_size=st.sampled_from([1, 2, 16]))
    def start(self, page_size: int):
        self.page_size = page_size
        self.tree = RadixTree(page_size)

    def tokens(self, values: list[int], num_more: int) -> list[int]:
        tokens = [value for value in values for _ in range(self.page_size)]
        return tokens + [1] * (num_more % self.page_size)

    def prefixes(self, namespace: bytes, tokens: list[int]) -> list[Edge]:
        """One prefix for each full page."""
        size = self.page_size
        ends = range(size, len(tokens) + 1, size)
        return [(namespace, *tokens[:end]) for end in ends]

    def held_prefixes(self) -> set[Edge]:
        return {prefix_of(node) for path in self.held for node in path}

    @rule(ns=namespaces, values=page_values, num_more=st.integers(0, 15), limit=st.integers(-1, 6))
    def match(self, ns: bytes, values: list[int], num_more: int, limit: int):
        tokens = self.tokens(values, num_more)
        path = self.tree.match(ns, tokens, limit)
        known = [prefix for prefix in self.prefixes(ns, tokens) if prefix in self.known]
        assert [prefix_of(node) for node in path] == known[: max(0, limit)]

    @rule(ns=namespaces, values=page_values, num_more=st.integers(0, 15), limit=st.integers(0, 5))
    def hold_and_insert(self, ns: bytes, values: list[int], num_more: int, limit: int):
        tokens = self.tokens(values, num_more)
        path = self.tree.match(ns, tokens, limit)
        self.tree.hold(path)
        prefixes = self.prefixes(ns, tokens)[len(path) :]
        pages = [(next(self.fresh_page), next(self.fresh_page)) for _ in prefixes]
        added = self.tree.insert(path, ns, tokens, pages)
        new = {p: page for p, page in zip(prefixes, pages, strict=True) if p not in self.known}
        assert {prefix_of(node): node.pages for node in added} == new
        self.known |= new
        self.held.append(path)
        assert [prefix_of(node) for node in path] == self.prefixes(ns, tokens)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 99))
    def unhold(self, index: int):
        path = self.held.pop(index % len(self.held))
        self.tree.unhold(path)
        now = next(self.clock)
        self.let_go_at |= dict.fromkeys(map(prefix_of, path), now)

    @rule()
    def evict(self):
        held = self.held_prefixes()
        parents = {prefix[: -self.page_size] for prefix in self.known}
        leaves = [p for p in self.known if p not in held and p not in parents]
        if not leaves:
            assert self.tree.num_evictable == 0
            with pytest.raises(InvariantError):
                self.tree.evict()
            return
        oldest = min(leaves, key=lambda prefix: self.let_go_at[prefix])
        assert self.tree.evict().pages == self.known.pop(oldest)

    @precondition(lambda self: len(self.known) > 4)
    @rule()
    def reset(self):
        pages = sorted(node.pages for node in self.tree.reset())
        assert pages == sorted(self.known.values())
        self.known.clear()
        self.held.clear()

    @invariant()
    def same_tree(self):
        self.tree.check()
        assert {prefix_of(node): node.pages for node in self.tree.nodes()} == self.known
        assert self.tree.num_pages == len(self.known)
        assert self.tree.num_evictable == len(self.known.keys() - self.held_prefixes())


TreeMachine.TestCase.settings = settings(deadline=None, max_examples=150, stateful_step_count=30)
TestRadixTree = TreeMachine.TestCase
