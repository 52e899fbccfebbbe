"""The radix tree: which prefixes are cached, in which pages, and who may not lose them.

It owns the pages of all cached prefixes, the reference counts on them, and the order in which unreferenced ones are
evicted; what it evicts it returns, and the caller gives that to the pool. Full attention decides what a node is: it has
a page for each page of tokens. Further KV groups (`GroupPages`) hang their pages on the same nodes and may lose them
earlier, so a match ends where every group has what it needs.

Only whole pages enter, so no two nodes share a page. A node that somebody holds always ends at the same token: a split
puts a new node *above* it, which inherits its reference count, and an eviction never touches a locked node. So lock
what `match` or `insert` returns before the next `evict` or `reset`. No walk recurses: a conversation may be thousands
of nodes deep.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bough.core.plan import IntArray
from bough.memory.tree import inspection
from bough.memory.tree.events import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, hash_blocks
from bough.memory.tree.eviction import POLICIES, VictimQueue
from bough.memory.tree.groups import GroupPages, NameArray
from bough.memory.tree.node import TOKEN, TOKEN_BYTES, Edge, Namespace, Node, common_prefix, cut, detach, split

NO_PAGES: IntArray = np.empty(0, dtype=np.int32)
NO_NAMES: NameArray = np.empty(0, dtype=np.int64)


class Match(NamedTuple):
    """The longest cached prefix of a key. `node` ends exactly there and can be locked; `pages` is a copy to keep."""

    node: Node
    pages: IntArray
    length: int  # tokens
    group_pages: tuple[IntArray, ...] = ()  # of each further group: as long as `pages`, 0 for what is not read
    known: int = 0  # tokens that the tree has, though a further group may lack what a request needs to go on there


class Inserted(NamedTuple):
    """A key that is in the tree now. Where `pages` differ from those the caller offered, the tree had its own already,
    and the caller still owns its duplicates: it swaps its table and gives them back to the pool."""

    node: Node
    pages: IntArray  # the tree's, for the whole key
    existing: int  # tokens that were in the tree before


class RadixTree:
    """Cached prefixes by namespace and token ids; keys of different namespaces share nothing."""

    def __init__(
        self,
        page_size: int = 1,
        policy: str = "lru",
        on_event: Callable[[KVEvent], None] | None = None,
        groups: Sequence[GroupPages] = (),
        medium: str = DEVICE,
    ) -> None:
        """`medium` is what events call the memory of these pages."""
        self.page_size = page_size
        self._medium = medium
        self._groups = tuple(groups)
        # For others only to look at.
        self.evictable_pages = 0  # that `evict` could free
        self.protected_pages = 0  # by locks
        self.node_count = 0  # without the root
        self.clock = 0  # counts lookups and insertions
        self.root = Node(None, b"", b"", NO_PAGES, (), (), created=0, last_used=0)
        self._page_bytes = page_size * TOKEN_BYTES
        self._on_event = on_event
        self._victims = VictimQueue(POLICIES[policy])

    @property
    def total_pages(self) -> int:
        """All pages that the tree owns."""
        return self.evictable_pages + self.protected_pages

    # -- finding and adding -----------------------------------------------------------------------------------------

    def match(self, key: IntArray, namespace: Namespace = "", *, touch: bool = True) -> Match:
        """The longest cached prefix of `key` that a request can go on behind, in whole pages. With `touch`, it counts
        as used."""
        data, known = self._encode(key), 0
        if self._groups:
            walked = self._walk(data, namespace)
            known, data = (walked[1] + walked[2]) // TOKEN_BYTES, data[: self._usable_length(*walked)]
        path, length = self._descend(data, namespace)
        if not path:
            return Match(self.root, NO_PAGES.copy(), 0, tuple(NO_PAGES.copy() for _ in self._groups), known)
        if touch:
            self.clock += 1
            for node in path:
                node.last_used = self.clock
                node.hits += 1
            self._victims.offer(path[-1])
        pages = np.concatenate([node.pages for node in path])
        others = tuple(group.needed(names_of(path, index)) for index, group in enumerate(self._groups))
        return Match(path[-1], pages, length // TOKEN_BYTES, others, known)

    def match_length(self, key: IntArray, namespace: Namespace = "") -> int:
        """How many tokens `match` would find; changes nothing."""
        return self._usable_length(*self._walk(self._encode(key), namespace)) // TOKEN_BYTES

    def pages_of(self, key: IntArray, namespace: Namespace = "") -> tuple[IntArray, ...]:
        """Of each group, the pages that the tree has for the longest part of `key` that it knows, 0 where a further
        group has none; changes nothing."""
        path, length, inside = self._walk(self._encode(key), namespace)
        count = (length + inside) // self._page_bytes
        pages = np.concatenate([NO_PAGES, *(node.pages for node in path)])[:count]
        return pages, *(group.present(names_of(path, index)[:count]) for index, group in enumerate(self._groups))

    def insert(
        self,
        key: IntArray,
        pages: IntArray,
        namespace: Namespace = "",
        *,
        priority: int = 0,
        group_pages: Sequence[IntArray] = (),
    ) -> Inserted:
        """Adds the whole pages of `key`. The tree becomes the owner of those `pages` whose tokens it did not have, and
        of those `group_pages` (0: none) that it lacks; other pages of further groups stay the caller's."""
        data = self._encode(key)
        if len(pages) * self._page_bytes != len(data):
            raise ValueError(
                f"{len(key)} tokens fill {len(data) // self._page_bytes} pages, but {len(pages)} were given."
            )
        path, length = self._descend(data, namespace)
        self.clock += 1
        for node in path:
            node.last_used = self.clock
            node.priority = max(node.priority, priority)
        last = path[-1] if path else self.root
        if length < len(data):
            path.append(self._add_leaf(last, data, length, pages, namespace, priority))
            last = path[-1]
        self._victims.offer(last)
        if group_pages:
            self._cache_in_groups(path, group_pages)
        owned = np.concatenate([node.pages for node in path]) if path else NO_PAGES.copy()
        return Inserted(last, owned, length // TOKEN_BYTES)

    def attach(self, key: IntArray, namespace: Namespace, group: int, page: int) -> None:
        """Caches a page of a further group at the end of `key`, if the tree still has that."""
        data = self._encode(key)
        path, length = self._descend(data, namespace)
        if path and length == len(data):
            pages = np.zeros(len(path[-1].pages), dtype=np.int32)
            pages[-1] = page
            names = list(path[-1].group_names)
            names[group] = self._groups[group].cache(names[group], pages)
            path[-1].group_names = tuple(names)

    # -- protecting -------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keeps `node` and all above it from eviction, until as many calls of `unlock`."""
        self._demand_member(node)
        while node.parent is not None:
            if node.locks == 0:
                self.evictable_pages -= len(node.pages)
                self.protected_pages += len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Takes one `lock` of this node back."""
        self._demand_member(node)
        lowest = node
        while node.parent is not None:
            if node.locks == 0:
                raise ValueError("The node is unlocked more often than it was locked.")
            node.locks -= 1
            if node.locks == 0:
                self.evictable_pages += len(node.pages)
                self.protected_pages -= len(node.pages)
            node = node.parent
        self._victims.offer(lowest)

    # -- removing ---------------------------------------------------------------------------------------------------

    def evict(self, n_pages: int, before: Callable[[Node], None] | None = None) -> IntArray:
        """Frees `n_pages`, or all that are evictable if those are fewer, and hands them to the caller. `before` sees
        each leaf while it is whole.

        A leaf that is longer than what is missing loses only its tail: the rest of it stays useful as a prefix.
        """
        freed: list[IntArray] = []
        removed: list[int] = []
        missing = n_pages
        while missing > 0 and (leaf := self._victims.pop()) is not None:
            if before is not None:
                before(leaf)
            dropped = min(missing, len(leaf.pages))
            keep = len(leaf.pages) - dropped
            freed.append(leaf.pages[keep:])
            self._drop_in_groups(leaf, keep)
            removed.extend(leaf.hashes[keep:])
            missing -= dropped
            self.node_count -= not keep
            self._victims.offer(cut(leaf, 0, keep, self._page_bytes) if keep else detach(leaf))
        if removed:
            self._emit(BlockRemoved(tuple(removed), self._medium))
        pages: IntArray = np.concatenate([NO_PAGES, *freed])
        self.evictable_pages -= len(pages)
        return pages

    def reset(self) -> IntArray:
        """Drops all that is not locked and returns its pages; they now belong to the caller."""
        pages = self._drop([node for node in self.nodes() if node.locks == 0])
        self._victims.clear()
        return pages

    def forget(self, key: IntArray, namespace: Namespace = "") -> IntArray:
        """Drops the nodes of `key` and all below them, but for what is locked, and returns their pages."""
        path = self._walk(self._encode(key), namespace)[0]
        first = next((node for node in path if node.locks == 0), None)
        if first is None:
            return NO_PAGES.copy()
        above = first.parent
        pages = self._drop([first, *inspection.descendants(first)])
        self._victims.offer(above or self.root)
        return pages

    def _drop(self, dropped: list[Node]) -> IntArray:
        for node in dropped:  # parents before children: a dropped parent has let go of its children already
            if node.parent is not None:
                node.parent.children.pop(node.edge, None)
            node.parent = None
            node.children = {}
            self._drop_in_groups(node, 0)
        pages: IntArray = np.concatenate([NO_PAGES, *(node.pages for node in dropped)])
        self.evictable_pages -= len(pages)
        self.node_count -= len(dropped)
        if not self.root.children and self._medium == DEVICE:
            self._emit(AllBlocksCleared())
        elif hashes := tuple(block for node in dropped for block in node.hashes):
            self._emit(BlockRemoved(hashes, self._medium))
        return pages

    # -- looking inside ---------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children."""
        return inspection.descendants(self.root)

    def pages_in_use(self) -> IntArray:
        """All pages that the tree owns."""
        return np.concatenate([NO_PAGES, *(node.pages for node in self.nodes())])

    def check(self) -> list[str]:
        """Discrepancies in what the tree says of itself; empty when all is well."""
        problems = inspection.structure_problems(self.root, self.page_size, hashed=self._on_event is not None)
        pages, counts = np.unique(self.pages_in_use(), return_counts=True)
        problems += [f"tree: page {page} belongs more than once" for page in pages[counts > 1][:20].tolist()]
        kept = {"evictable pages": self.evictable_pages, "protected pages": self.protected_pages}
        books = inspection.counter_problems(self.root, kept | {"nodes": self.node_count})
        return problems + books + self._victims.check(self.nodes())

    # -- internals --------------------------------------------------------------------------------------------------

    def _encode(self, key: IntArray) -> bytes:
        """The bytes of the whole pages of `key`."""
        tokens = np.asarray(key, dtype=TOKEN)
        rest = len(tokens) % self.page_size
        return tokens[: len(tokens) - rest].tobytes() if rest else tokens.tobytes()

    def _walk(self, data: bytes, namespace: Namespace) -> tuple[list[Node], int, int]:
        """Follows `data` down. Returns the nodes read in full, their length, and how many bytes of whole pages of one
        further node agree; that node is then the last of the list."""
        width = self._page_bytes
        path: list[Node] = []
        position = 0
        edge: Edge = (namespace, data[:width])
        node = self.root
        while (child := node.children.get(edge)) is not None:
            path.append(child)
            if not data.startswith(child.tokens, position):
                same = common_prefix(child.tokens, data, position)
                return path, position, same - same % width
            position += len(child.tokens)
            edge = data[position : position + width]
            node = child
        return path, position, 0

    def _descend(self, data: bytes, namespace: Namespace) -> tuple[list[Node], int]:
        """Follows `data` down and splits the node in whose middle it ends, so that all nodes returned agree in full."""
        path, length, inside = self._walk(data, namespace)
        if inside:
            path[-1] = split(path[-1], inside, self._page_bytes)
            self.node_count += 1
        return path, length + inside

    def _add_leaf(
        self, parent: Node, data: bytes, start: int, pages: IntArray, namespace: Namespace, priority: int
    ) -> Node:
        """Hangs what follows `start` in `data` below `parent`."""
        head = data[start : start + self._page_bytes]
        leaf = Node(
            parent,
            head if start else (namespace, head),
            data[start:],
            np.array(pages[start // self._page_bytes :], dtype=np.int32),  # a copy: the caller may edit its own
            (),
            tuple(np.zeros(len(pages) - start // self._page_bytes, dtype=np.int64) for _ in self._groups),
            created=self.clock,
            last_used=self.clock,
            priority=priority,
        )
        parent.children[leaf.edge] = leaf
        self.evictable_pages += len(leaf.pages)
        self.node_count += 1
        if self._on_event is not None:
            above = parent.hashes[-1] if start else None
            leaf.hashes = hash_blocks(leaf.tokens, self._page_bytes, above, namespace)
            token_ids = tuple(np.frombuffer(leaf.tokens, TOKEN).tolist())
            stored = leaf.hashes, above, token_ids, self.page_size
            self._on_event(BlockStored(*stored, medium=self._medium, namespace=namespace))
        return leaf

    def _usable_length(self, path: list[Node], length: int, inside: int) -> int:
        """How many of the bytes that `_walk` found a request can go on behind."""
        pages = (length + inside) // self._page_bytes
        if not self._groups or not pages:
            return length + inside
        usable = np.ones(pages, dtype=np.bool_)
        for index, group in enumerate(self._groups):
            usable &= group.usable(names_of(path, index)[:pages])
        ends = np.flatnonzero(usable)
        return (int(ends[-1]) + 1) * self._page_bytes if len(ends) else 0

    def _cache_in_groups(self, path: list[Node], group_pages: Sequence[IntArray]) -> None:
        begin = 0
        for node in path:
            end = begin + len(node.pages)
            pairs = zip(self._groups, node.group_names, group_pages, strict=True)
            node.group_names = tuple(group.cache(names, pages[begin:end]) for group, names, pages in pairs)
            begin = end

    def _drop_in_groups(self, node: Node, keep: int) -> None:
        for group, names in zip(self._groups, node.group_names, strict=True):
            group.drop(names[keep:])

    def _demand_member(self, node: Node) -> None:
        if node.parent is None and node is not self.root:
            raise ValueError("The node has left the tree: lock what match or insert returns before the next eviction.")

    def _emit(self, event: KVEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)


def names_of(nodes: Iterable[Node], group: int) -> NameArray:
    """The names of all pages of a further group, those without a page left included."""
    return np.concatenate([NO_NAMES, *(node.group_names[group] for node in nodes)])
