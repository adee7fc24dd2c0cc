import pytest

from dovetail.cache.pages import PagePool
from dovetail.errors import InvariantError


def test_a_fresh_pool_hands_out_every_page_once():
    pool = PagePool(4)
    assert pool.take(0) == []
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(1) == [3]
    assert pool.num_free == 0
    pool.check()


def test_take_refuses_more_than_there_is_and_takes_nothing():
    pool = PagePool(2)
    with pytest.raises(InvariantError):
        pool.take(3)
    with pytest.raises(InvariantError):
        pool.take(-1)
    assert pool.num_free == 2
    pool.check()


def test_a_page_is_free_only_after_its_last_release():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.retain([page, page])
    assert pool.ref_count(page) == 3
    pool.release([page, page])
    assert pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2
    assert pool.ref_count(page) == 0
    pool.check()


def test_the_page_freed_last_is_taken_first():
    pool = PagePool(8)
    pages = pool.take(8)
    pool.release([pages[5]])
    pool.release([pages[2]])
    assert pool.take(1) == [pages[2]]


@pytest.mark.parametrize("page", [-1, 0, 1, 2])
def test_free_and_unknown_pages_have_no_reference_to_add_or_drop(page: int):
    pool = PagePool(2)
    pool.release(pool.take(1))
    with pytest.raises(InvariantError, match=f"retain of page {page}"):
        pool.retain([page])
    with pytest.raises(InvariantError, match=f"release of page {page}"):
        pool.release([page])
    pool.check()


def test_check_finds_a_leak_a_double_entry_and_a_live_page_in_the_free_list():
    leaked = PagePool(2)
    leaked._ref_counts[0] = 0
    leaked._free.remove(0)
    twice = PagePool(2)
    twice._free.append(0)
    live = PagePool(2)
    live._free.append(live.take(1)[0])
    for pool in (leaked, twice, live):
        with pytest.raises(InvariantError):
            pool.check()
