"""One node of the radix tree: a run of tokens, the pages that hold their keys and values, and how it has been used; and
the surgery on single nodes (split, cut, detach), which knows nothing of counters, locks or victims elsewhere.

Tokens are kept as the bytes of their int32 array, because `bytes.startswith` compares two runs with one `memcmp` and no
allocation, and a slice of bytes is a ready dictionary key. Arrays in a node are replaced, never written into.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from bough.core.plan import IntArray
from bough.memory.tree.groups import NameArray

Namespace: TypeAlias = str

# What a parent finds a child by: the bytes of the child's first page of tokens. Children of the root add their
# namespace, so that namespaces never meet and none needs a node of its own that would have to be cleaned up.
Edge: TypeAlias = bytes | tuple[Namespace, bytes]

TOKEN_BYTES = 4
TOKEN = np.dtype(np.int32)


@dataclass(slots=True, eq=False)
class Node:
    """Owned by the tree; others only hold it to lock and unlock it."""

    parent: Node | None  # None: the root, or a node that was removed
    edge: Edge
    tokens: bytes
    pages: IntArray  # one per `page_size` tokens
    hashes: tuple[int, ...]  # one per page; empty when nobody listens to events
    group_names: tuple[NameArray, ...]  # of each further KV group: one name per page, 0 or outdated where it has none
    created: int  # times are readings of the tree's logical clock
    last_used: int
    hits: int = 0  # matches that read this node
    priority: int = 0  # the highest of the requests that inserted it
    locks: int = 0  # on this node and on all below it
    ticket: int = 0  # its valid entry in the victim queue; 0 = none
    children: dict[Edge, Node] = field(default_factory=dict)

    @property
    def evictable(self) -> bool:
        """A leaf of the tree that nobody reads; the root never is one."""
        return self.locks == 0 and not self.children and self.parent is not None


def path_to(node: Node | None) -> list[Node]:
    """The nodes from the root's child down to `node`."""
    path: list[Node] = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def key_of(node: Node) -> tuple[IntArray, Namespace]:
    """All tokens from the root to the end of `node`, and their namespace."""
    path = path_to(node)
    edge = path[0].edge if path else b""
    return np.frombuffer(b"".join(each.tokens for each in path), TOKEN), edge[0] if isinstance(edge, tuple) else ""


def common_prefix(run: bytes, data: bytes, start: int) -> int:
    """How many whole tokens, in bytes, `run` and `data[start:]` have in common."""
    tokens = min(len(run), len(data) - start) // TOKEN_BYTES
    differs = np.frombuffer(run, TOKEN, tokens) != np.frombuffer(data, TOKEN, tokens, start)
    first = int(differs.argmax())  # 0 when nothing differs
    return (first if differs[first] else tokens) * TOKEN_BYTES


def split(node: Node, at: int, page_bytes: int) -> Node:
    """Moves the first `at` bytes of `node` into a new node above it, which it returns. Whoever holds `node` still holds
    the same prefix, because `node` keeps its end."""
    parent = node.parent
    assert parent is not None  # the root has no tokens to split
    count, total = at // page_bytes, len(node.pages)
    upper = cut(replace(node, ticket=0, children={}), 0, count, page_bytes)
    parent.children[node.edge] = upper
    node.parent = upper
    node.edge = node.tokens[at : at + page_bytes]
    cut(node, count, total, page_bytes)
    upper.children[node.edge] = node
    return upper


def cut(node: Node, first: int, end: int, page_bytes: int) -> Node:
    """Leaves the pages from `first` to `end` of `node`, and returns it."""
    node.tokens = node.tokens[first * page_bytes : end * page_bytes]
    node.pages = node.pages[first:end].copy()  # a view would keep the whole array alive
    node.hashes = node.hashes[first:end]
    node.group_names = tuple(names[first:end].copy() for names in node.group_names)
    return node


def detach(leaf: Node) -> Node:
    """Takes `leaf` off the tree, and returns its former parent."""
    parent = leaf.parent
    assert parent is not None  # the root is never taken off
    del parent.children[leaf.edge]
    leaf.parent = None
    return parent
