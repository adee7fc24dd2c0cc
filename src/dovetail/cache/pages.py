# pyright: strict
"""Owns the free list and the reference counts of one pool of pages.

A page is a small integer; what its memory holds, who refers to it and why must
not be known here. The owners keep the books in ``cache.ledger``.
"""

from collections.abc import Iterable

from dovetail.errors import InvariantError


class PagePool:
    """Hands out page ids and takes them back when their last reference goes.

    Owns: the free list and one reference count a page.
    Invariant: a page is in the free list, once, exactly if its count is 0.
    Thread: the scheduler's.

    The free list is a stack. The page freed last is the one most likely to be in a
    cache still, and a reader that wrongly uses a page after its release meets the new
    owner's data at once, in the first test, instead of after one turn of the pool.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._ref_counts = [0] * num_pages
        # Taken from the end, so that a fresh pool gives 0, 1, 2, ...
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of pages that nobody refers to."""
        return len(self._free)

    def ref_count(self, page: int) -> int:
        """Number of references to ``page``; 0 if it is free."""
        return self._ref_counts[page]

    def take(self, num: int) -> list[int]:
        """Take ``num`` free pages, each with one reference.

        Raises InvariantError if there are too few: callers ask ``num_free`` first.
        """
        if not 0 <= num <= len(self._free):
            raise InvariantError(f"take {num} pages, but {len(self._free)} are free")
        start = len(self._free) - num
        taken = self._free[start:]
        del self._free[start:]
        taken.reverse()
        for page in taken:
            self._ref_counts[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each of ``pages``, which somebody refers to already."""
        counts = self._ref_counts
        for page in pages:
            if not (0 <= page < self.num_pages and counts[page]):
                raise InvariantError(f"retain of page {page}, which is free or does not exist")
            counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each of ``pages``; its last one puts a page into the free list."""
        counts = self._ref_counts
        for page in pages:
            if not (0 <= page < self.num_pages and counts[page]):
                raise InvariantError(f"release of page {page}, which is free or does not exist")
            counts[page] -= 1
            if not counts[page]:
                self._free.append(page)

    def check(self) -> None:
        """Raise InvariantError unless exactly the pages with count 0 are free. O(pages)."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError(f"a page is twice in the free list {sorted(self._free)}")
        for page, count in enumerate(self._ref_counts):
            if count < 0 or (page in free) != (count == 0):
                where = "free" if page in free else "not free"
                raise InvariantError(f"page {page} has {count} references and is {where}")
