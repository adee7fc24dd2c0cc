from dataclasses import dataclass

import pytest

from dovetail.cache.groups import PagedGroup
from dovetail.cache.ledger import Holding, KVLedger
from dovetail.errors import ConfigError, InvariantError

NS = b"epoch 0"


def make(num_pages: int = 8, page_size: int = 2) -> KVLedger:
    return KVLedger((PagedGroup("full", page_size),), (num_pages,))


def run(ledger: KVLedger, tokens: list[int], namespace: bytes = NS) -> Holding:
    """Open a sequence as a prompt is opened, and compute and publish all of it."""
    holding = ledger.open(namespace, tokens, max_cached=len(tokens) - 1)
    assert ledger.extend(holding, len(tokens))
    ledger.publish(holding, tokens, len(tokens))
    ledger.check()
    return holding


def cache(ledger: KVLedger, tokens: list[int], namespace: bytes = NS) -> None:
    ledger.release(run(ledger, tokens, namespace))
    ledger.check()


def test_a_new_sequence_gets_pages_as_it_grows():
    ledger = make()
    holding = ledger.open(NS, [1, 2, 3], max_cached=2)
    assert holding.cached_len == 0
    assert ledger.table(holding) == []
    assert ledger.extend(holding, 3)
    assert len(ledger.table(holding)) == 2
    before = list(ledger.table(holding))
    assert ledger.extend(holding, 4)
    assert ledger.table(holding) == before
    assert ledger.extend(holding, 5)
    assert ledger.table(holding)[:2] == before
    ledger.check()


def test_a_published_prefix_is_found_by_the_next_sequence():
    ledger = make()
    first = run(ledger, [1, 2, 3, 4, 5])
    assert ledger.match_len(NS, [1, 2, 3, 4, 9], max_cached=4) == 4
    second = ledger.open(NS, [1, 2, 3, 4, 9], max_cached=4)
    assert second.cached_len == 4
    assert ledger.table(second) == ledger.table(first)[:2]
    assert ledger.stats().hit_tokens == 4
    ledger.check()


@pytest.mark.parametrize(
    ("max_cached", "cached"), [(-1, 0), (0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (99, 4)]
)
def test_a_match_is_whole_pages_below_the_bound(max_cached: int, cached: int):
    ledger = make()
    cache(ledger, [1, 2, 3, 4, 5])
    assert ledger.match_len(NS, [1, 2, 3, 4, 5], max_cached=max_cached) == cached
    assert ledger.open(NS, [1, 2, 3, 4, 5], max_cached=max_cached).cached_len == cached


def test_nothing_is_shared_before_it_is_published_or_across_namespaces():
    ledger = make()
    holding = ledger.open(NS, [1, 2, 3, 4], max_cached=3)
    ledger.extend(holding, 4)
    assert ledger.match_len(NS, [1, 2, 3, 4], max_cached=4) == 0
    ledger.publish(holding, [1, 2, 3, 4], 3)
    assert ledger.match_len(NS, [1, 2, 3, 4], max_cached=4) == 2
    assert ledger.match_len(b"epoch 1", [1, 2, 3, 4], max_cached=4) == 0


def test_publish_reads_tokens_only_as_far_as_they_are_computed():
    ledger = make()
    holding = ledger.open(NS, [1, 2], max_cached=1)
    ledger.extend(holding, 6)
    ledger.publish(holding, [1, 2], 2)
    ledger.publish(holding, [1, 2, 3, 4, 99], 4)
    assert ledger.match_len(NS, [1, 2, 3, 4, 5, 6], max_cached=6) == 4
    with pytest.raises(InvariantError):
        ledger.publish(holding, [1, 2, 3, 4, 5], 6)
    with pytest.raises(InvariantError):
        ledger.publish(holding, list(range(8)), 8)


def test_two_sequences_with_the_same_tokens_keep_their_own_pages():
    ledger = make(num_pages=6)
    tokens = [1, 2, 3, 4, 5]
    first, second = (ledger.open(NS, tokens, max_cached=4) for _ in range(2))
    assert ledger.extend(first, 5)
    assert ledger.extend(second, 5)
    own = list(ledger.table(second))
    ledger.publish(first, tokens, 5)
    ledger.publish(second, tokens, 5)
    ledger.check()
    assert ledger.table(second) == own
    third = ledger.open(NS, tokens, max_cached=4)
    assert ledger.table(third) == ledger.table(first)[:2]
    # Below the first one's nodes the second one adds its own.
    ledger.publish(second, [*tokens, 6], 6)
    ledger.release(first)
    ledger.release(third)
    ledger.check()
    # The first one's pages stay, as the second one's last page hangs below them.
    assert ledger.stats().evictable == 0
    assert ledger.num_available == 1
    ledger.release(second)
    ledger.check()
    assert ledger.match_len(NS, [1, 2, 3, 4, 5, 6], max_cached=6) == 6
    assert ledger.stats().free == 3
    assert ledger.num_available == 6


def test_the_last_sequence_gets_rid_of_twins_by_opening_again():
    ledger = make(num_pages=4)
    tokens = [1, 2, 3, 4]
    first, second = (ledger.open(NS, tokens, max_cached=3) for _ in range(2))
    for holding in (first, second):
        assert ledger.extend(holding, 4)
        ledger.publish(holding, tokens, 4)
    ledger.release(first)
    assert not ledger.extend(second, 5)
    ledger.release(second)
    again = ledger.open(NS, [*tokens, 5], max_cached=4)
    assert ledger.extend(again, 8)
    ledger.check()


def test_extend_evicts_the_least_recently_used_pages():
    ledger = make(num_pages=4)
    cache(ledger, [1, 1])
    cache(ledger, [2, 2, 2, 2])
    ledger.release(ledger.open(NS, [1, 1], max_cached=2))  # young again
    holding = ledger.open(NS, [3, 3, 3, 3], max_cached=3)
    assert ledger.extend(holding, 4)
    ledger.check()
    assert ledger.match_len(NS, [1, 1], max_cached=2) == 2
    assert ledger.match_len(NS, [2, 2, 2, 2], max_cached=4) == 2
    assert ledger.stats().evictions == 1


def test_extend_is_all_or_nothing():
    ledger = make(num_pages=4)
    cache(ledger, [1, 1, 1, 1])
    holding = ledger.open(NS, [2], max_cached=0)
    assert not ledger.can_extend(holding, 10)
    assert not ledger.extend(holding, 10)
    assert ledger.table(holding) == []
    assert ledger.stats().evictions == 0
    assert ledger.match_len(NS, [1, 1, 1, 1], max_cached=4) == 4
    assert ledger.can_extend(holding, 8)
    assert ledger.extend(holding, 8)
    ledger.check()


def test_many_are_extended_together_as_they_would_be_one_by_one():
    tables = []
    for together in (True, False):
        ledger = make(num_pages=6)
        holdings = [ledger.open(NS, [i], max_cached=0) for i in range(3)]
        assert ledger.extend(holdings[1], 3)
        if together:
            assert ledger.extend_all(holdings)
        else:
            assert all(ledger.extend(holding, holding.capacity + 1) for holding in holdings)
        assert [holding.capacity for holding in holdings] == [2, 6, 2]
        tables.append([list(ledger.table(holding)) for holding in holdings])
        ledger.check()
    assert tables[0] == tables[1]


def test_many_are_extended_all_or_none_and_evict_what_that_takes():
    ledger = make(num_pages=4)
    cache(ledger, [1, 1])
    holdings = [ledger.open(NS, [i], max_cached=0) for i in range(3)]
    assert ledger.extend(holdings[0], 2)
    assert ledger.extend_all([]) and ledger.extend_all(holdings[:1])
    assert not ledger.extend_all(holdings)
    assert [len(ledger.table(holding)) for holding in holdings] == [2, 0, 0]
    assert ledger.stats().evictions == 0
    assert ledger.extend_all(holdings[1:])
    assert ledger.stats().evictions == 1
    ledger.check()
    ledger.release(holdings[2])
    with pytest.raises(InvariantError):
        ledger.extend_all(holdings)


def test_can_extend_without_a_holding_is_about_a_new_sequence():
    ledger = make(num_pages=4)
    cache(ledger, [1, 1, 1, 1])
    held = run(ledger, [2, 2])
    assert ledger.num_available == 3
    assert ledger.can_extend(None, 6)
    assert not ledger.can_extend(None, 7)
    ledger.release(held)
    assert ledger.can_extend(None, 8)


def test_can_open_does_not_count_the_matched_pages_twice():
    ledger = make(num_pages=4)
    cache(ledger, [1, 1, 1, 1])
    cache(ledger, [2, 2, 2, 2])
    tokens = [1, 1, 1, 1, 3]
    # 2 pages matched, 2 evictable besides them: 8 tokens fit and 9 do not.
    assert ledger.num_available == 4
    assert ledger.can_open(NS, tokens, max_cached=4, num_tokens=8)
    assert not ledger.can_open(NS, tokens, max_cached=4, num_tokens=9)
    # Matched pages that somebody else holds cost nothing either.
    other = ledger.open(NS, tokens, max_cached=4)
    assert ledger.can_open(NS, tokens, max_cached=4, num_tokens=8)
    assert not ledger.can_open(NS, tokens, max_cached=4, num_tokens=9)
    # Without the match the same request would not fit.
    assert not ledger.can_open(NS, tokens, max_cached=0, num_tokens=5)
    holding = ledger.open(NS, tokens, max_cached=4)
    assert ledger.extend(holding, 8)
    ledger.check()
    assert ledger.table(holding)[:2] == ledger.table(other)


def test_an_unshareable_sequence_publishes_nothing_more():
    ledger = make()
    tokens = [1, 2, 3, 4, 5, 6]
    holding = ledger.open(NS, tokens, max_cached=5)
    ledger.extend(holding, 6)
    ledger.publish(holding, tokens, 2)
    ledger.unshareable(holding)
    ledger.publish(holding, tokens, 6)
    assert ledger.match_len(NS, tokens, max_cached=6) == 2
    ledger.release(holding)
    ledger.check()
    assert ledger.stats().evictable == 1


def test_release_frees_private_pages_and_keeps_published_ones():
    ledger = make()
    holding = run(ledger, [1, 2, 3, 4, 5])
    assert (ledger.stats().free, ledger.stats().evictable, ledger.stats().held) == (5, 0, 3)
    ledger.release(holding)
    ledger.check()
    stats = ledger.stats()
    assert (stats.total, stats.free, stats.evictable, stats.held) == (8, 6, 2, 0)


def test_a_released_holding_is_dead():
    ledger = make()
    holding = run(ledger, [1, 2, 3])
    ledger.release(holding)
    for use in (
        lambda: ledger.release(holding),
        lambda: ledger.extend(holding, 0),
        lambda: ledger.can_extend(holding, 1),
        lambda: ledger.publish(holding, [1, 2], 2),
        lambda: ledger.unshareable(holding),
        lambda: ledger.forget(holding),
        lambda: make().release(holding),
    ):
        with pytest.raises(InvariantError):
            use()
    with pytest.raises(IndexError):
        ledger.table(holding)
    ledger.check()


def test_after_a_flush_nothing_older_is_found():
    ledger = make()
    cache(ledger, [9, 9])
    tokens = [1, 2, 3, 4, 5, 6]
    first = run(ledger, tokens[:4])
    second = ledger.open(NS, tokens, max_cached=5)
    waiting = ledger.open(NS, [7, 7, 7], max_cached=2)
    ledger.extend(waiting, 3)
    pages = list(ledger.table(second))
    ledger.flush()
    ledger.check()
    assert ledger.stats().evictable == 0
    for old in (tokens, [9, 9]):
        assert ledger.match_len(NS, old, max_cached=9) == 0
    # Running sequences keep their pages, even shared ones, and publish nothing.
    assert ledger.table(first) == ledger.table(second) == pages
    ledger.extend(second, 6)
    ledger.publish(second, tokens, 6)
    ledger.publish(waiting, [7, 7, 7], 3)
    ledger.release(first)
    ledger.check()
    assert ledger.match_len(NS, tokens, max_cached=9) == 0
    ledger.release(second)
    ledger.release(waiting)
    ledger.check()
    assert ledger.stats().free == 8
    cache(ledger, tokens)
    assert ledger.match_len(NS, tokens, max_cached=9) == 6


def test_what_begins_with_a_forgotten_page_is_not_found():
    ledger = make()
    tokens, other = [1, 2, 3, 4, 5, 6], [1, 2, 9, 9]
    cache(ledger, [9, 9])
    cache(ledger, other)
    first = run(ledger, tokens[:4])
    second = ledger.open(NS, tokens, max_cached=5)
    ledger.extend(second, 6)
    pages = list(ledger.table(second))
    ledger.forget(first)
    ledger.forget(first)
    ledger.check()
    assert [ledger.match_len(NS, ids, max_cached=9) for ids in (tokens, other, [9, 9])] == [0, 0, 2]
    # Who runs on it keeps its pages, and publishes nothing.
    assert ledger.table(second) == pages
    ledger.publish(second, tokens, 6)
    ledger.release(first)
    ledger.release(second)
    ledger.check()
    assert ledger.match_len(NS, tokens, max_cached=9) == 0 and ledger.stats().free == 7
    cache(ledger, tokens)
    assert ledger.match_len(NS, tokens, max_cached=9) == 6


def test_a_prefix_longer_than_the_recursion_limit():
    ledger = make(num_pages=6000, page_size=1)
    tokens = list(range(5000))
    cache(ledger, tokens)
    assert ledger.match_len(NS, tokens, max_cached=4999) == 4999
    ledger.flush()
    ledger.check()
    assert ledger.stats().free == 6000


# -- several groups ---------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointGroup:
    """A prefix can be used up to a multiple of ``step`` tokens only."""

    name: str
    page_size: int
    step: int

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def reusable_len(self, matched_len: int) -> int:
        return matched_len // self.step * self.step

    def first_live_page(self, num_tokens: int) -> int:
        return 0


def test_groups_have_pools_of_their_own_and_the_smallest_decides():
    ledger = KVLedger((PagedGroup("a", 2), PagedGroup("b", 2)), (4, 6))
    assert ledger.num_available == 4
    cache(ledger, [1, 1, 1, 1])
    holding = ledger.open(NS, [1, 1, 2, 2], max_cached=3)
    assert not ledger.extend(holding, 10)
    assert ledger.extend(holding, 8)
    ledger.check()
    assert len(ledger.table(holding, 0)) == len(ledger.table(holding, 1)) == 4
    assert ledger.stats().free == 2
    assert ledger.stats().evictions == 1
    ledger.release(holding)
    ledger.flush()
    assert ledger.stats().free == ledger.stats().total == 10


def test_a_match_is_as_long_as_every_group_can_serve():
    steps = [("full", 1), ("slow", 6), ("odd", 5)]
    ledger = KVLedger(tuple(CheckpointGroup(n, 2, s) for n, s in steps), (20, 20, 20))
    tokens = list(range(40))
    cache(ledger, tokens)
    # 38 -> 36 (6s) -> 35 (5s) is half a page: 34 -> 30, which suits both.
    assert ledger.match_len(NS, tokens, max_cached=39) == 30
    assert ledger.match_len(NS, tokens, max_cached=29) == 0
    holding = ledger.open(NS, tokens, max_cached=39)
    assert holding.cached_len == 30
    assert [len(table) for table in holding.tables] == [15, 15, 15]
    ledger.check()


def test_groups_must_agree_on_the_page_size_and_have_a_pool_each():
    with pytest.raises(ConfigError):
        KVLedger((PagedGroup("a", 2), PagedGroup("b", 4)), (4, 4))
    with pytest.raises(ConfigError):
        KVLedger((PagedGroup("a", 2),), (4, 4))
    with pytest.raises(ConfigError):
        KVLedger((), ())


# -- the audit --------------------------------------------------------------------


def test_check_names_the_page_and_its_owners():
    ledger = make()
    holding = run(ledger, [1, 2, 3])
    page = ledger.table(holding)[1]
    ledger._pools[0].retain([page])
    with pytest.raises(InvariantError, match=rf"full page {page} has 2 references.*Holding"):
        ledger.check()


def test_check_finds_cooked_books():
    def leak(ledger: KVLedger, holding: Holding):
        holding.tables[0].pop()

    def foreign_page(ledger: KVLedger, holding: Holding):
        holding.tables[0][-1] = 7

    def swapped_pages(ledger: KVLedger, holding: Holding):
        holding.tables[0][:2] = reversed(holding.tables[0][:2])

    def forgotten_holding(ledger: KVLedger, holding: Holding):
        del ledger._holdings[holding]

    def forgotten_node(ledger: KVLedger, holding: Holding):
        holding.path.pop()

    def foreign_namespace(ledger: KVLedger, holding: Holding):
        holding.namespace = b"x"

    def lost_node(ledger: KVLedger, holding: Holding):
        ledger._tree.reset()

    harms = (leak, foreign_page, swapped_pages, forgotten_holding, forgotten_node)
    for harm in (*harms, foreign_namespace, lost_node):
        ledger = make()
        holding = run(ledger, [1, 2, 3, 4, 5])
        harm(ledger, holding)
        with pytest.raises(InvariantError):
            ledger.check()
