"""Reads a radix tree for its audit: walks and discrepancies. It changes nothing."""

from collections.abc import Iterator

import numpy as np

from bough.memory.tree.events import hash_blocks
from bough.memory.tree.node import TOKEN, TOKEN_BYTES, Edge, Namespace, Node

PREVIEW_TOKENS = 8


def descendants(root: Node) -> Iterator[Node]:
    """All nodes below `root`, parents before children."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def structure_problems(root: Node, page_size: int, *, hashed: bool) -> list[str]:
    """Where links, child keys, page counts, reference counts or hashes do not fit together."""
    problems: list[str] = []
    width = page_size * TOKEN_BYTES
    stack: list[tuple[Node, Namespace | None]] = [(root, None)]
    while stack:
        parent, known = stack.pop()
        if parent is not root and parent.locks < sum(child.locks for child in parent.children.values()):
            problems.append(f"{describe(parent)}: fewer locks than its children together")
        for edge, child in parent.children.items():
            namespace = edge[0] if isinstance(edge, tuple) else known
            problems += [f"{describe(child)}: {what}" for what in _link_problems(root, parent, edge, child, width)]
            if namespace is not None and hashed and len(child.tokens) % width == 0:
                above = parent.hashes[-1] if parent.hashes else None
                if child.hashes != hash_blocks(child.tokens, width, above, namespace):
                    problems.append(f"{describe(child)}: its block hashes do not follow from its tokens")
            stack.append((child, namespace))
    return problems


def _link_problems(root: Node, parent: Node, edge: Edge, child: Node, width: int) -> Iterator[str]:
    if child.parent is not parent:
        yield "it does not know its parent"
    if edge != child.edge:
        yield "its parent finds it under another key than its own"
    if isinstance(edge, tuple) != (parent is root):
        yield "only children of the root carry a namespace"
    if (edge[1] if isinstance(edge, tuple) else edge) != child.tokens[:width]:
        yield "its key is not its first page of tokens"
    if not child.tokens or len(child.tokens) % width:
        yield "its tokens are not whole pages"
    if len(child.pages) * width != len(child.tokens):
        yield f"{len(child.pages)} pages for {len(child.tokens) // TOKEN_BYTES} tokens"
    if any(len(names) != len(child.pages) for names in child.group_names):
        yield "a further group has names for another number of pages"
    if child.locks < 0:
        yield f"it has {child.locks} locks"


def counter_problems(root: Node, evictable: int, protected: int) -> list[str]:
    """Where the counters that are kept step by step differ from a recount."""
    problems: list[str] = []
    counted = {True: 0, False: 0}
    for node in descendants(root):
        counted[node.locks > 0] += len(node.pages)
    if counted[False] != evictable:
        problems.append(f"tree: {evictable} evictable pages on the books, {counted[False]} counted")
    if counted[True] != protected:
        problems.append(f"tree: {protected} protected pages on the books, {counted[True]} counted")
    return problems


def describe(node: Node) -> str:
    """One line that names a node."""
    tokens = np.frombuffer(node.tokens, TOKEN, min(PREVIEW_TOKENS, len(node.tokens) // TOKEN_BYTES)).tolist()
    more = " ..." if len(node.tokens) > PREVIEW_TOKENS * TOKEN_BYTES else ""
    return f"[{' '.join(map(str, tokens))}{more}] {len(node.tokens) // TOKEN_BYTES} tokens"
