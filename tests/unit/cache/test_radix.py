import pytest

from dovetail.cache.radix import Node, RadixTree
from dovetail.errors import InvariantError

NS = b"epoch 0"


def grow(tree: RadixTree, tokens: list[int], first_page: int, namespace: bytes = NS) -> list[Node]:
    """Insert all full pages of ``tokens`` as pages first_page, first_page + 1, ...; held."""
    path: list[Node] = []
    num = len(tokens) // tree.page_size
    tree.insert(path, namespace, tokens, [(first_page + i,) for i in range(num)])
    return path


def pages(path: list[Node]) -> list[int]:
    return [node.pages[0] for node in path]


def test_match_finds_the_longest_run_of_full_pages():
    tree = RadixTree(2)
    grow(tree, [1, 2, 3, 4, 5], 10)
    assert tree.num_pages == 2
    assert pages(tree.match(NS, [1, 2, 3, 4, 5, 6], 9)) == [10, 11]
    assert pages(tree.match(NS, [1, 2, 3, 9], 9)) == [10]
    assert pages(tree.match(NS, [1, 2, 3], 9)) == [10]
    assert pages(tree.match(NS, [1, 2, 3, 4], 1)) == [10]
    for tokens, limit in ([1], 9), ([], 9), ([2, 1], 9), ([3, 4], 9), ([1, 2], 0), ([1, 2], -1):
        assert tree.match(NS, tokens, limit) == []
    tree.check()


def test_namespaces_share_nothing():
    tree = RadixTree(1)
    grow(tree, [1, 2], 0, b"a")
    assert tree.match(b"b", [1, 2], 9) == []
    assert tree.match(b"", [1, 2], 9) == []
    grow(tree, [1, 2], 5, b"b")
    assert pages(tree.match(b"a", [1, 2], 9)) == [0, 1]
    assert pages(tree.match(b"b", [1, 2], 9)) == [5, 6]
    tree.check()


def test_insert_keeps_what_is_there_and_goes_on_below():
    tree = RadixTree(2)
    grow(tree, [1, 2, 3, 4], 0)
    path: list[Node] = []
    added = tree.insert(path, NS, [1, 2, 3, 4, 5, 6], [(70,), (71,), (72,)])
    assert pages(added) == [72]
    assert pages(path) == [0, 1, 72]
    assert pages(tree.match(NS, [1, 2, 3, 4, 5, 6], 9)) == [0, 1, 72]
    tree.check()


def test_insert_needs_the_tokens_of_every_page():
    with pytest.raises(InvariantError):
        RadixTree(2).insert([], NS, [1, 2, 3], [(0,), (1,)])


def test_held_pages_are_not_evictable():
    tree = RadixTree(1)
    long = grow(tree, [1, 2, 3], 0)
    short = tree.match(NS, [1, 2], 9)
    tree.hold(short)
    assert tree.num_evictable == 0
    with pytest.raises(InvariantError):
        tree.evict()
    tree.unhold(long)
    assert tree.num_evictable == 1
    assert tree.evict().pages == (2,)
    assert tree.num_evictable == 0
    tree.unhold(short)
    assert tree.num_evictable == 2
    tree.check()


def test_eviction_takes_the_end_of_the_path_let_go_first():
    tree = RadixTree(1)
    old, young = grow(tree, [1, 2, 3], 0), grow(tree, [1, 2, 4, 5], 10)
    tree.unhold(old)
    tree.unhold(young)
    # Node 3 is older; 1 and 2 were used by the young path too and go last.
    assert [tree.evict().pages[0] for _ in range(5)] == [2, 13, 12, 1, 0]
    assert tree.num_pages == 0
    tree.check()


def test_holding_again_makes_a_path_young():
    tree = RadixTree(1)
    first, second = grow(tree, [1], 0), grow(tree, [2], 1)
    tree.unhold(first)
    tree.unhold(second)
    tree.hold(first)
    tree.unhold(first)
    assert tree.evict().pages == (1,)


def test_asking_does_not_make_a_path_young():
    tree = RadixTree(1)
    first, second = grow(tree, [1], 0), grow(tree, [2], 1)
    tree.unhold(first)
    tree.unhold(second)
    tree.match(NS, [1], 9)
    assert tree.evict().pages == (0,)


def test_reset_forgets_held_and_unheld_paths():
    tree = RadixTree(1)
    grow(tree, [1, 2], 0)
    tree.unhold(grow(tree, [3], 5))
    assert sorted(node.pages[0] for node in tree.reset()) == [0, 1, 5]
    assert tree.num_pages == tree.num_evictable == 0
    assert tree.match(NS, [1, 2], 9) == []
    tree.check()


def test_paths_deeper_than_the_recursion_limit():
    tree = RadixTree(1)
    tokens = list(range(20_000))
    path = grow(tree, tokens, 0)
    tree.check()
    assert len(tree.match(NS, tokens, len(tokens))) == len(tokens)
    tree.unhold(path)
    tree.evict()
    assert len(tree.reset()) == len(tokens) - 1


def test_check_finds_broken_trees():
    def moved(tree: RadixTree, path: list[Node]):
        path[1].parent = path[0].parent

    def more_holders_below(tree: RadixTree, path: list[Node]):
        path[1].num_holders += 1

    def held_but_queued(tree: RadixTree, path: list[Node]):
        tree._unheld[path[0]] = None

    def parent_first(tree: RadixTree, path: list[Node]):
        tree.unhold(path)
        tree._unheld.move_to_end(path[0], last=False)

    def miscounted(tree: RadixTree, path: list[Node]):
        tree.num_pages += 1

    for harm in (moved, more_holders_below, held_but_queued, parent_first, miscounted):
        tree = RadixTree(2)
        path = grow(tree, [1, 2, 3, 4], 0)
        tree.check()
        harm(tree, path)
        with pytest.raises(InvariantError):
            tree.check()
