"""What a `TextTree` holds, and whether its accounts agree."""

from __future__ import annotations

from collections.abc import Iterator

from bough.gateway.policies.text_tree import TextNode, TextTree, held_below


def size(tree: TextTree, worker: str) -> int:
    """How many characters the worker holds."""
    return tree._sizes.get(worker, 0)


def nodes(tree: TextTree) -> Iterator[TextNode]:
    """All nodes but the root, parents before children."""
    waiting = list(tree._root.children.values())
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children.values())
        yield node


def check(tree: TextTree) -> None:
    """Pieces, holders, ends and sizes agree."""
    sizes: dict[str, int] = dict.fromkeys(tree._sizes, 0)
    counts: dict[str, int] = dict.fromkeys(tree._counts, 0)
    for node in nodes(tree):
        parent = node.parent
        assert node.text and node.holders, "a node without text or holder"
        assert parent is not None and parent.children[node.text[0]] is node, "a node that its parent does not know"
        if parent is not tree._root:
            assert node.holders.keys() <= parent.holders.keys(), "a holder without the text before"
        for worker in node.holders:
            sizes[worker] += len(node.text)
            counts[worker] += 1
            assert (node in tree._ends[worker]) != held_below(node, worker), "an end that is none, or is not known"
    assert sizes == tree._sizes and counts == tree._counts, "sizes that do not add up"
