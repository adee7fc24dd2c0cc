# pyright: strict
"""Owns how each kind of KV memory grows with a sequence's length.

A model declares its groups; the ledger asks them this protocol and nothing else. The
bytes of a page, its tensors and the attention over it must not be known here.

One kind is built, ``PagedGroup``. How the others will fit:

- latent (MLA): pages as in ``PagedGroup``; only the bytes of a page differ, which the
  ledger never sees.
- window: ``pages_for`` as in ``PagedGroup`` (a table keeps the index of every page it
  ever had), ``first_live_page`` follows the window, so that the pages behind it go back
  to the pool while the sequence runs.
- state (recurrent): one page a sequence, whatever its length; ``reusable_len`` rounds
  down to the last checkpoint, because a state cannot be cut back to an earlier token.
"""

from dataclasses import dataclass
from typing import Protocol


class KVGroup(Protocol):
    """Layers whose KV memory is paged alike: one page table and one pool for all of them."""

    @property
    def name(self) -> str:
        """Name in messages and statistics."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens a page holds; the same for all groups of a model."""
        ...

    def pages_for(self, num_tokens: int) -> int:
        """Length of the page table of a sequence of ``num_tokens`` tokens.

        Never falls, and rises only where ``num_tokens`` passes a page border.
        """
        ...

    def reusable_len(self, matched_len: int) -> int:
        """How many of ``matched_len`` tokens found in the prefix tree this group can serve."""
        ...

    def first_live_page(self, num_tokens: int) -> int:
        """Index of the first page that token ``num_tokens`` still reads.

        Those before it may be given back. (The ledger does not ask yet: ``PagedGroup``
        keeps all.)
        """
        ...


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Full-length attention: every token's KV is kept as long as its sequence runs.

    Owns: nothing; an immutable rule, usable from any thread.
    """

    name: str
    page_size: int

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens; the last may be partly filled."""
        return -(-num_tokens // self.page_size)

    def reusable_len(self, matched_len: int) -> int:
        """All of it."""
        return matched_len

    def first_live_page(self, num_tokens: int) -> int:
        """Always 0: every token reads all tokens before it."""
        del num_tokens
        return 0
