# pyright: strict
"""Owns the prefix tree: which full pages hold the KV of which token prefix.

One node is one page of tokens (one page id per KV group); the path from the root spells
the whole prefix, because KV depends on every token before it. Reference counts and free
lists must not be known here (``cache.pages``), nor sequences: who runs over a path is a
number of holders.

After "SGLang: Efficient Execution of Structured Language Model Programs"
(arXiv 2312.07104), with one node a page where that paper compresses runs: nodes need no
splitting, and a lookup is one dict access a page.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from dovetail.errors import InvariantError

Edge = tuple[bytes | int, ...]
"""A page's token ids; those of a prefix's first page have the namespace in front."""


class Node:
    """One page of tokens at the end of one prefix.

    Owns: its children. Changed by ``RadixTree`` alone, others read.
    Invariant: whoever holds a node holds its parent, so ``num_holders`` never rises on
    the way down.
    Thread: the scheduler's.
    """

    __slots__ = ("children", "edge", "num_holders", "pages", "parent")

    def __init__(self, parent: "Node | None", edge: Edge, pages: tuple[int, ...]) -> None:
        self.parent = parent
        self.edge = edge
        self.pages = pages
        self.children: dict[Edge, Node] = {}
        self.num_holders = 0

    def __repr__(self) -> str:
        return f"Node(edge={self.edge}, pages={self.pages}, num_holders={self.num_holders})"


class RadixTree:
    """Finds, keeps and forgets full pages by the tokens before and in them.

    Owns: the nodes and the order of eviction.
    Invariant: ``_unheld`` has every node without holders, each after all its descendants.
    Thread: the scheduler's.

    The order of eviction needs no clock and no heap. Holders hold whole paths from the
    root, so below a node without holders nothing is held; and a path that is let go is
    queued from its end to its beginning. So the front of the queue is always a leaf, the
    one least recently let go, and the length of the queue is what eviction can free.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self._root = Node(None, (), ())
        self._unheld: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_evictable(self) -> int:
        """Number of nodes that ``evict`` can take out, one after the other."""
        return len(self._unheld)

    def match(self, namespace: bytes, token_ids: Sequence[int], max_pages: int) -> list[Node]:
        """Return the longest known path of full pages, at most ``max_pages``; changes nothing.

        Recency is renewed by ``hold`` and ``unhold``, so that asking is free.
        """
        size = self.page_size
        end = max(0, min(len(token_ids) // size, max_pages)) * size
        # One copy: slices of a tuple are ready-made edges.
        tokens = tuple(token_ids[:end])
        path: list[Node] = []
        children = self._root.children
        for start in range(0, end, size):
            edge = tokens[start : start + size] if start else (namespace, *tokens[:size])
            node = children.get(edge)
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def hold(self, path: Sequence[Node]) -> None:
        """Keep a path, which starts at the root, from being evicted."""
        for node in path:
            if node.num_holders == 0:
                del self._unheld[node]
            node.num_holders += 1

    def unhold(self, path: Sequence[Node]) -> None:
        """Let go of a held path; what nobody else holds becomes the most recently used."""
        for node in reversed(path):
            node.num_holders -= 1
            if node.num_holders == 0:
                self._unheld[node] = None

    def insert(
        self,
        path: list[Node],
        namespace: bytes,
        token_ids: Sequence[int],
        new_pages: Sequence[tuple[int, ...]],
    ) -> list[Node]:
        """Lengthen a held path by one node for each of ``new_pages``; return the added nodes.

        ``token_ids`` starts at the prefix's beginning. A node that is there already keeps
        its pages and is held like an added one: the path goes on below it.
        """
        size = self.page_size
        if len(token_ids) < (len(path) + len(new_pages)) * size:
            raise InvariantError(f"{len(token_ids)} tokens do not fill the pages to insert")
        added: list[Node] = []
        for pages in new_pages:
            start = len(path) * size
            tokens = tuple(token_ids[start : start + size])
            edge = tokens if path else (namespace, *tokens)
            parent = path[-1] if path else self._root
            node = parent.children.get(edge)
            if node is None:
                node = parent.children[edge] = Node(parent, edge, pages)
                self.num_pages += 1
                added.append(node)
            elif node.num_holders == 0:
                del self._unheld[node]
            node.num_holders += 1
            path.append(node)
        return added

    def evict(self) -> Node:
        """Take out the least recently used leaf that nobody holds, and return it."""
        if not self._unheld:
            raise InvariantError("evict: every page of the tree is held")
        node, _ = self._unheld.popitem(last=False)
        parent = node.parent
        if node.children or parent is None:
            raise InvariantError(f"evict: {node} is not a leaf")
        del parent.children[node.edge]
        self.num_pages -= 1
        return node

    def remove(self, top: Node) -> list[Node]:
        """Forget a node and all below it, held or not, and return them.

        Paths through it are void: they must not be given to this tree again.
        """
        nodes = list(self._below([top]))
        if top.parent is not None:
            del top.parent.children[top.edge]
        for node in nodes:
            node.children.clear()
            self._unheld.pop(node, None)
        self.num_pages -= len(nodes)
        return nodes

    def reset(self) -> list[Node]:
        """Forget everything, held or not, and return the nodes there were.

        Paths held until now are void: they must not be given to this tree again.
        """
        nodes = list(self.nodes())
        for node in nodes:
            # Parents and children refer to each other; freed here, not by the collector.
            node.children.clear()
        self._root.children.clear()
        self._unheld.clear()
        self.num_pages = 0
        return nodes

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before their children. O(nodes)."""
        return self._below(list(self._root.children.values()))

    def _below(self, stack: list[Node]) -> Iterator[Node]:
        """The nodes of the stack and all below them, parents before their children."""
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raise InvariantError unless links, counts and eviction order fit. O(nodes)."""
        place = {node: index for index, node in enumerate(self._unheld)}
        num_pages = 0
        for node in self.nodes():
            num_pages += 1
            self._check_links(node)
            if (node in place) != (node.num_holders == 0):
                raise InvariantError(f"{node} is wrongly in or out of the eviction queue")
            # Each holder goes on to one child at most.
            if sum(child.num_holders for child in node.children.values()) > node.num_holders:
                raise InvariantError(f"below {node} are more holders than it has")
            if node in place and any(
                place[child] > place[node] for child in node.children.values()
            ):
                raise InvariantError(f"{node} would be evicted before its children")
        if num_pages != self.num_pages or len(place) > num_pages:
            raise InvariantError(
                f"{num_pages} nodes in the tree, {self.num_pages} counted, {len(place)} queued"
            )

    def _check_links(self, node: Node) -> None:
        """Raise InvariantError unless ``node`` hangs where its edge says."""
        parent = node.parent
        if parent is None or parent.children.get(node.edge) is not node:
            raise InvariantError(f"{node} is not the child of its parent")
        if len(node.edge) != self.page_size + (parent is self._root):
            raise InvariantError(f"{node} is not one page of tokens")
