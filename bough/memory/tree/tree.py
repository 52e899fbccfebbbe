"""The radix tree: which prefixes are cached, in which pages, and who may not lose them.

It owns the pages of all cached prefixes, the reference counts on them, and the order in which unreferenced ones are
evicted. It leaves free pages to `PagePool`, pages not yet inserted to the requests that hold them, and tensors to
others: what it evicts it returns, and the caller gives that to the pool.

Two promises carry the rest. Only whole pages enter, so no two nodes share a page. And a node that somebody holds always
ends at the same token: a split puts a new node *above* it, which inherits its reference count; only an eviction, which
never touches a locked node, can shorten or remove it. So lock what `match` or `insert` returns before the next `evict`
or `reset`.

No walk recurses: a long conversation may be thousands of nodes deep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from bough.core.plan import IntArray
from bough.memory.tree import inspection
from bough.memory.tree.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, hash_blocks
from bough.memory.tree.eviction import VictimQueue, find_policy
from bough.memory.tree.node import TOKEN, TOKEN_BYTES, Edge, Namespace, Node, common_prefix, cut, detach, split

NO_PAGES: IntArray = np.empty(0, dtype=np.int32)


class Match(NamedTuple):
    """The longest cached prefix of a key. `node` ends exactly there and can be locked; `pages` is a copy to keep."""

    node: Node
    pages: IntArray
    length: int  # tokens


class Inserted(NamedTuple):
    """A key that is in the tree now. Where `pages` differ from those the caller offered, the tree had its own already,
    and the caller still owns its duplicates: it swaps its table and gives them back to the pool."""

    node: Node
    pages: IntArray  # the tree's, for the whole key
    existing: int  # tokens that were in the tree before


class RadixTree:
    """Cached prefixes by namespace and token ids; keys of different namespaces share nothing."""

    def __init__(
        self, page_size: int = 1, policy: str = "lru", on_event: Callable[[KVEvent], None] | None = None
    ) -> None:
        self.page_size = page_size
        self._evictable = 0  # pages
        self._protected = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._on_event = on_event
        self._victims = VictimQueue(find_policy(policy))
        self._clock = 0
        self._root = Node(None, b"", b"", NO_PAGES, (), created=0, last_used=0)

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could free."""
        return self._evictable

    @property
    def protected_pages(self) -> int:
        """Pages that a lock protects."""
        return self._protected

    @property
    def total_pages(self) -> int:
        """All pages that the tree owns."""
        return self._evictable + self._protected

    # -- finding and adding -----------------------------------------------------------------------------------------

    def match(self, key: IntArray, namespace: Namespace = "", *, touch: bool = True) -> Match:
        """The longest cached prefix of `key`, in whole pages; with `touch`, it counts as used."""
        path, length = self._descend(self._encode(key), namespace)
        if not path:
            return Match(self._root, NO_PAGES.copy(), 0)
        if touch:
            self._clock += 1
            for node in path:
                node.last_used = self._clock
                node.hits += 1
            self._victims.offer(path[-1])
        return Match(path[-1], np.concatenate([node.pages for node in path]), length // TOKEN_BYTES)

    def match_length(self, key: IntArray, namespace: Namespace = "") -> int:
        """How many tokens `match` would find; changes nothing."""
        _, length, inside = self._walk(self._encode(key), namespace)
        return (length + inside) // TOKEN_BYTES

    def insert(self, key: IntArray, pages: IntArray, namespace: Namespace = "", *, priority: int = 0) -> Inserted:
        """Adds the whole pages of `key`. The tree becomes the owner of those `pages` whose tokens it did not have."""
        data = self._encode(key)
        if len(pages) * self._page_bytes != len(data):
            raise ValueError(
                f"{len(key)} tokens fill {len(data) // self._page_bytes} pages, but {len(pages)} were given."
            )
        path, length = self._descend(data, namespace)
        self._clock += 1
        for node in path:
            node.last_used = self._clock
            node.priority = max(node.priority, priority)
        last = path[-1] if path else self._root
        if length < len(data):
            path.append(self._add_leaf(last, data, length, pages, namespace, priority))
            last = path[-1]
        self._victims.offer(last)
        owned = np.concatenate([node.pages for node in path]) if path else NO_PAGES.copy()
        return Inserted(last, owned, length // TOKEN_BYTES)

    # -- protecting -------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keeps `node` and all above it from eviction, until as many calls of `unlock`."""
        self._demand_member(node)
        while node.parent is not None:
            if node.locks == 0:
                self._evictable -= len(node.pages)
                self._protected += len(node.pages)
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
                self._evictable += len(node.pages)
                self._protected -= len(node.pages)
            node = node.parent
        self._victims.offer(lowest)

    # -- removing ---------------------------------------------------------------------------------------------------

    def evict(self, n_pages: int) -> IntArray:
        """Frees `n_pages`, or all that are evictable if those are fewer, and hands them to the caller.

        A leaf that is longer than what is missing loses only its tail: the rest of it stays useful as a prefix.
        """
        freed: list[IntArray] = []
        removed: list[int] = []
        missing = n_pages
        while missing > 0 and (leaf := self._victims.pop()) is not None:
            dropped = min(missing, len(leaf.pages))
            keep = len(leaf.pages) - dropped
            freed.append(leaf.pages[keep:])
            removed.extend(leaf.hashes[keep:])
            missing -= dropped
            self._victims.offer(cut(leaf, keep, self._page_bytes) if keep else detach(leaf))
        if removed:
            self._emit(BlockRemoved(tuple(removed)))
        if not freed:
            return NO_PAGES.copy()
        pages = np.concatenate(freed)
        self._evictable -= len(pages)
        return pages

    def reset(self) -> IntArray:
        """Drops all that is not locked and returns its pages; they now belong to the caller."""
        dropped = [node for node in self.nodes() if node.locks == 0]
        for node in dropped:  # parents before children: a dropped parent has let go of its children already
            if node.parent is not None:
                node.parent.children.pop(node.edge, None)
            node.parent = None
            node.children = {}
        self._victims.clear()
        self._evictable = 0
        if not self._root.children:
            self._emit(AllBlocksCleared())
        elif hashes := tuple(block for node in dropped for block in node.hashes):
            self._emit(BlockRemoved(hashes))
        return np.concatenate([node.pages for node in dropped]) if dropped else NO_PAGES.copy()

    # -- looking inside ---------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children."""
        return inspection.descendants(self._root)

    def pages_in_use(self) -> IntArray:
        """All pages that the tree owns."""
        return np.concatenate([NO_PAGES, *(node.pages for node in self.nodes())])

    def check(self) -> list[str]:
        """Discrepancies in what the tree says of itself; empty when all is well."""
        problems = inspection.structure_problems(self._root, self.page_size, hashed=self._on_event is not None)
        problems += inspection.sharing_problems(self._root)
        problems += inspection.counter_problems(self._root, self._evictable, self._protected)
        return problems + self._victims.check(self.nodes())

    def dump(self) -> str:
        """The tree as readable lines."""
        return inspection.render(self._root, self._evictable, self._protected)

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
        node = self._root
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
            created=self._clock,
            last_used=self._clock,
            priority=priority,
        )
        parent.children[leaf.edge] = leaf
        self._evictable += len(leaf.pages)
        if self._on_event is not None:
            above = parent.hashes[-1] if start else None
            leaf.hashes = hash_blocks(leaf.tokens, self._page_bytes, above, namespace)
            token_ids = tuple(np.frombuffer(leaf.tokens, TOKEN).tolist())
            self._on_event(BlockStored(leaf.hashes, above, token_ids, self.page_size, namespace=namespace))
        return leaf

    def _demand_member(self, node: Node) -> None:
        if node.parent is None and node is not self._root:
            raise ValueError("The node has left the tree: lock what match or insert returns before the next eviction.")

    def _emit(self, event: KVEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)
