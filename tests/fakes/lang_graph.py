"""What a traced program does, as one list."""

from collections.abc import Iterator

from bough.lang.graph import Lane, Node


def nodes_of(lane: Lane) -> Iterator[Node]:
    """In the order of the program, branches one after the other."""
    for item in lane:
        if isinstance(item, Node):
            yield item
        else:
            for branch in item:
                yield from nodes_of(branch)
