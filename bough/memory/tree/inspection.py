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


def _link_problems(root: Node, parent: Node, edge: Edge, child: Node, width: int) -> list[str]:
    head, tokens, count = edge[1] if isinstance(edge, tuple) else edge, child.tokens, len(child.pages)
    found = {
        "it does not know its parent": child.parent is not parent,
        "its parent finds it under another key than its own": edge != child.edge,
        "only children of the root carry a namespace": isinstance(edge, tuple) != (parent is root),
        "its key is not its first page of tokens": head != tokens[:width],
        "its tokens are not whole pages": not tokens or len(tokens) % width > 0,
        f"{count} pages for {len(tokens) // TOKEN_BYTES} tokens": count * width != len(tokens),
        "a further group has names for another number of pages": any(len(each) != count for each in child.group_names),
        f"it has {child.locks} locks": child.locks < 0,
    }
    return [what for what, wrong in found.items() if wrong]


def counter_problems(root: Node, books: dict[str, int]) -> list[str]:
    """Where the counters that are kept step by step differ from a recount."""
    counted = dict.fromkeys(books, 0)
    for node in descendants(root):
        counted["protected pages" if node.locks else "evictable pages"] += len(node.pages)
        counted["nodes"] += 1
    wrong = (kind for kind, count in counted.items() if count != books[kind])
    return [f"tree: {books[kind]} {kind} on the books, {counted[kind]} counted" for kind in wrong]


def describe(node: Node) -> str:
    """One line that names a node."""
    tokens = np.frombuffer(node.tokens, TOKEN, min(PREVIEW_TOKENS, len(node.tokens) // TOKEN_BYTES)).tolist()
    more = " ..." if len(node.tokens) > PREVIEW_TOKENS * TOKEN_BYTES else ""
    return f"[{' '.join(map(str, tokens))}{more}] {len(node.tokens) // TOKEN_BYTES} tokens"
