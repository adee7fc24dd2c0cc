# pyright: strict
"""Owns all pages of KV memory: which are free, cached, or held by a running sequence.

``KVLedger`` is the only writer of page pools and prefix tree, so one conservation law
covers every page (``KVLedger.check``). It sees token ids and page ids; requests,
scheduling and devices must not be known here.

Sharing has three rules. Only full pages are shared. They are shared after they were
computed (``publish``), never while. And a running sequence's table is append-only: if two
sequences computed the same page, the tree keeps the first one's and the other keeps its
own, privately, until it ends. So nothing that was ever handed to a forward changes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from dovetail.cache.groups import KVGroup
from dovetail.cache.pages import PagePool
from dovetail.cache.radix import Node, RadixTree
from dovetail.errors import ConfigError, InvariantError


@dataclass(slots=True, eq=False)
class Holding:
    """The pages of one running sequence. Read by the scheduler, written by ``KVLedger`` alone.

    Owns: one page table per group. They only ever grow, so a reader needs no more than a
    cursor to learn what is new.
    Invariants: ``path[i]`` is the tree's node for the page at index ``i``, and is held. Its
    page is the table's, unless another sequence published the same tokens first.
    Thread: the scheduler's.
    """

    namespace: bytes
    cached_len: int
    """Tokens served by the prefix tree when the holding was opened."""
    capacity: int
    """Tokens the tables have room for; -1 once released."""
    tables: tuple[list[int], ...]
    """Page ids, one list per group; no lists once released."""
    path: list[Node] = field(repr=False)
    """One node for each published page: its length is the cursor of ``publish``."""
    shareable: bool = True
    """False once pages computed from now on must not be published."""


@dataclass(frozen=True, slots=True)
class LedgerStats:
    """Counts of one moment, in pages over all groups; the last two since the start.

    ``total = free + evictable + held``; pages that only the tree keeps, but that a running
    sequence's published pages hang below, count as held.
    """

    total: int
    free: int
    evictable: int
    held: int
    hit_tokens: int
    evictions: int


class KVLedger:
    """Gives pages to sequences, publishes what they computed, evicts what nobody uses.

    Owns: the page pools, one per group, the prefix tree and the open holdings.
    Invariant: a page's reference count is the number of holdings that have it in a table,
    plus one if it is in the tree.
    Thread: the scheduler's, which is its only caller.

    A holding also holds the *nodes* of all that it published, even where its own page is
    private. So below an unheld node nothing is held, and ``num_available`` is exact. The
    price: until its release, a sequence with private pages keeps the tree's twins of them
    too. If it is the last one running and still cannot be extended, release it and open it
    again: then it runs on the twins, and needs no more pages than its length.
    """

    def __init__(self, groups: tuple[KVGroup, ...], num_pages: Sequence[int]) -> None:
        """Set up empty pools of ``num_pages[g]`` pages for each group ``g``.

        Raises ConfigError if the groups' page sizes differ: a tree node is one page of each.
        """
        if not groups or len(groups) != len(num_pages):
            raise ConfigError("kv_groups", f"{len(groups)} groups, {len(num_pages)} pool sizes")
        if len({group.page_size for group in groups}) != 1:
            raise ConfigError("page_size", "all KV groups of a model need the same page size")
        self.groups = groups
        self.page_size = groups[0].page_size
        self._pools = tuple(PagePool(num) for num in num_pages)
        self._tree = RadixTree(self.page_size)
        # A dict for its order: whatever depends on it is the same on all ranks.
        self._holdings: dict[Holding, None] = {}
        self._hit_tokens = 0
        self._evictions = 0

    # -- asking ---------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Pages that every group could hand out now: free ones and those it can evict."""
        return min(pool.num_free for pool in self._pools) + self._tree.num_evictable

    def match_len(self, namespace: bytes, token_ids: Sequence[int], *, max_cached: int) -> int:
        """Tokens that ``open`` would find cached; changes nothing."""
        return len(self._match(namespace, token_ids, max_cached)) * self.page_size

    def can_open(
        self, namespace: bytes, token_ids: Sequence[int], *, max_cached: int, num_tokens: int
    ) -> bool:
        """Whether ``open`` and then ``extend`` to ``num_tokens`` would succeed now."""
        path = self._match(namespace, token_ids, max_cached)
        # What the sequence is about to reuse cannot be evicted for it.
        num_revived = sum(node.num_holders == 0 for node in path)
        num_missing = self._num_missing([len(path)] * len(self.groups), num_tokens)
        return self._fits(num_missing, self._tree.num_evictable - num_revived)

    def can_extend(self, holding: Holding | None, num_tokens: int) -> bool:
        """Whether ``extend`` would succeed now; None stands for a holding without pages."""
        if holding is None:
            table_lens = [0] * len(self.groups)
        elif num_tokens <= holding.capacity:
            return True
        else:
            self._expect_open(holding)
            table_lens = [len(table) for table in holding.tables]
        return self._fits(self._num_missing(table_lens, num_tokens), self._tree.num_evictable)

    def table(self, holding: Holding, group: int = 0) -> list[int]:
        """The holding's page ids in one group, by page index; the live list, do not write."""
        return holding.tables[group]

    def stats(self) -> LedgerStats:
        """Counts of this moment."""
        total = sum(pool.num_pages for pool in self._pools)
        free = sum(pool.num_free for pool in self._pools)
        evictable = self._tree.num_evictable * len(self._pools)
        return LedgerStats(
            total=total,
            free=free,
            evictable=evictable,
            held=total - free - evictable,
            hit_tokens=self._hit_tokens,
            evictions=self._evictions,
        )

    # -- a sequence's life ----------------------------------------------------------

    def open(self, namespace: bytes, token_ids: Sequence[int], *, max_cached: int) -> Holding:
        """Start a sequence on the longest published prefix of at most ``max_cached`` tokens.

        ``cached_len`` of the result tells how many tokens need not be computed; it is a
        multiple of the page size. Takes no free page, so it always succeeds.
        """
        path = self._match(namespace, token_ids, max_cached)
        self._tree.hold(path)
        tables = tuple([node.pages[g] for node in path] for g in range(len(self.groups)))
        for pool, table in zip(self._pools, tables, strict=True):
            pool.retain(table)
        cached_len = len(path) * self.page_size
        holding = Holding(
            namespace=namespace,
            cached_len=cached_len,
            capacity=cached_len,
            tables=tables,
            path=path,
        )
        self._holdings[holding] = None
        self._hit_tokens += cached_len
        return holding

    def extend(self, holding: Holding, num_tokens: int) -> bool:
        """Make the tables long enough for ``num_tokens``, evicting cached pages as needed.

        All or nothing: False, with nothing changed or evicted, if there are too few pages.
        """
        if num_tokens <= holding.capacity:
            return True
        self._expect_open(holding)
        num_missing = self._num_missing([len(table) for table in holding.tables], num_tokens)
        if not self._fits(num_missing, self._tree.num_evictable):
            return False
        for pool, table, num in zip(self._pools, holding.tables, num_missing, strict=True):
            while pool.num_free < num:
                self._evict()
            table += pool.take(num)
        holding.capacity = -(-num_tokens // self.page_size) * self.page_size
        return True

    def extend_all(self, holdings: Sequence[Holding]) -> bool:
        """Make room in each for a token more than it has room for, evicting pages as needed.

        All or nothing: False, with nothing changed or evicted, if there are too few pages for all.
        """
        for holding in holdings:
            self._expect_open(holding)
        num_missing = [
            [group.pages_for(holding.capacity + 1) - len(holding.tables[g]) for holding in holdings]
            for g, group in enumerate(self.groups)
        ]
        if not self._fits([sum(nums) for nums in num_missing], self._tree.num_evictable):
            return False
        for g, (pool, nums) in enumerate(zip(self._pools, num_missing, strict=True)):
            while pool.num_free < sum(nums):
                self._evict()
            pages = iter(pool.take(sum(nums)))
            for holding, num in zip(holdings, nums, strict=True):
                holding.tables[g].extend(islice(pages, num))
        for holding in holdings:
            holding.capacity = (holding.capacity // self.page_size + 1) * self.page_size
        return True

    def publish(self, holding: Holding, token_ids: Sequence[int], num_computed: int) -> None:
        """Share the full pages among the first ``num_computed`` tokens, if not shared yet.

        ``token_ids`` is the sequence from its first token. Where the tree has the same tokens
        already, it keeps its page, and the holding keeps its own to itself.
        """
        num_full = num_computed // self.page_size
        if num_full <= len(holding.path) or not holding.shareable:
            return
        self._expect_open(holding)
        if num_computed > holding.capacity:
            raise InvariantError(f"{num_computed} tokens computed in room for {holding.capacity}")
        unpublished = (table[len(holding.path) : num_full] for table in holding.tables)
        new_pages = list(zip(*unpublished, strict=True))
        added = self._tree.insert(holding.path, holding.namespace, token_ids, new_pages)
        for g, pool in enumerate(self._pools):
            pool.retain(node.pages[g] for node in added)

    def unshareable(self, holding: Holding) -> None:
        """Publish nothing more of this holding; what it published before stays.

        For a sequence that runs on under new weights: its later pages belong to no epoch.
        """
        self._expect_open(holding)
        holding.shareable = False

    def release(self, holding: Holding) -> None:
        """End the holding: private pages become free, published ones stay as cache."""
        self._expect_open(holding)
        del self._holdings[holding]
        self._tree.unhold(holding.path)
        for pool, table in zip(self._pools, holding.tables, strict=True):
            pool.release(table)
        # A stale reader shall fail rather than find pages that others own by now.
        holding.tables = ()
        holding.path = []
        holding.capacity = -1

    def flush(self) -> None:
        """Forget every published page; nothing computed before is ever matched again.

        Running sequences keep their pages, which go to the free list at release. They publish
        nothing any more, as all they compute rests on what was computed before.
        """
        self._void(self._tree.reset(), list(self._holdings))

    def forget(self, holding: Holding) -> None:
        """Forget all that begins with the holding's first published page; it is not matched again.

        For pages that may hold something wrong. As after ``flush``, who runs on them keeps them and
        publishes nothing any more; nor does this holding, whatever it has published.
        """
        self._expect_open(holding)
        holding.shareable = False
        if not holding.path:
            return
        top = holding.path[0]
        below = [other for other in self._holdings if other.path and other.path[0] is top]
        self._void(self._tree.remove(top), below)

    # -- inside ---------------------------------------------------------------------

    def _match(self, namespace: bytes, token_ids: Sequence[int], max_cached: int) -> list[Node]:
        """Return the published path that every group can serve."""
        path = self._tree.match(namespace, token_ids, max_cached // self.page_size)
        # A group's answer may not suit another one, so ask until all take it whole.
        while path:
            usable = min(group.reusable_len(len(path) * self.page_size) for group in self.groups)
            if usable >= len(path) * self.page_size:
                break
            del path[usable // self.page_size :]
        return path

    def _void(self, forgotten: list[Node], holdings: list[Holding]) -> None:
        """Give up pages that the tree has forgotten, and the paths of those who run on them."""
        for g, pool in enumerate(self._pools):
            pool.release(node.pages[g] for node in forgotten)
        for holding in holdings:
            holding.path = []
            holding.shareable = False

    def _num_missing(self, table_lens: list[int], num_tokens: int) -> list[int]:
        """Pages that tables of these lengths lack for ``num_tokens``, per group."""
        return [
            max(0, group.pages_for(num_tokens) - length)
            for group, length in zip(self.groups, table_lens, strict=True)
        ]

    def _fits(self, num_missing: list[int], num_evictable: int) -> bool:
        return all(
            num <= pool.num_free + num_evictable
            for pool, num in zip(self._pools, num_missing, strict=True)
        )

    def _evict(self) -> None:
        node = self._tree.evict()
        for pool, page in zip(self._pools, node.pages, strict=True):
            pool.release([page])
        self._evictions += 1

    def _expect_open(self, holding: Holding) -> None:
        if holding not in self._holdings:
            raise InvariantError(f"{holding} is released, or of another ledger")

    # -- the books, audited ---------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError, naming page and owners, unless every page is accounted for.

        Each page is either free, or has exactly the references that the tree and the tables
        of the open holdings make. O(pages); tests call it after every step.
        """
        for pool in self._pools:
            pool.check()
        self._tree.check()
        self._check_holders()
        for group in range(len(self.groups)):
            self._check_owners(group)
        for holding in self._holdings:
            self._check_path(holding)

    def _check_holders(self) -> None:
        """Holder counts in the tree are the holdings whose path has the node."""
        counts = Counter(node for holding in self._holdings for node in holding.path)
        for node in self._tree.nodes():
            if node.num_holders != counts.pop(node, 0):
                raise InvariantError(f"{node} is held by another number of holdings")
        if counts:
            raise InvariantError(f"held, but not in the tree: {list(counts)}")

    def _check_owners(self, group: int) -> None:
        """Reference counts of a group's pages are the references there are."""
        name, pool = self.groups[group].name, self._pools[group]
        owners: list[list[Node | Holding]] = [[] for _ in range(pool.num_pages)]
        node_of: dict[int, Node] = {}
        for node in self._tree.nodes():
            page = node.pages[group]
            if page in node_of:
                raise InvariantError(f"{name} page {page} is in {node_of[page]} and in {node}")
            node_of[page] = node
            owners[page].append(node)
        for holding in self._holdings:
            for index, page in enumerate(holding.tables[group]):
                owners[page].append(holding)
                node = node_of.get(page)
                if node is not None and node not in holding.path[index : index + 1]:
                    raise InvariantError(f"{name} page {page} of {holding} is elsewhere: {node}")
        for page, who in enumerate(owners):
            if pool.ref_count(page) != len(who) or len(set(who)) != len(who):
                raise InvariantError(
                    f"{name} page {page} has {pool.ref_count(page)} references, owners: {who}"
                )

    def _check_path(self, holding: Holding) -> None:
        """A holding's path starts at the root and is no longer than its tables."""
        for group, table in zip(self.groups, holding.tables, strict=True):
            if len(table) != group.pages_for(holding.capacity):
                raise InvariantError(f"{group.name} table of {holding} does not fit its capacity")
            if len(holding.path) > len(table):
                raise InvariantError(f"{holding} published more pages than it has")
        if holding.path and holding.path[0].edge[0] != holding.namespace:
            raise InvariantError(f"{holding} is on the path of another namespace")
        for parent, node in pairwise(holding.path):
            if node.parent is not parent:
                raise InvariantError(f"the path of {holding} is broken at {node}")
