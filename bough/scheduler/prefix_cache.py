"""Pages and the tree that shares them, as one allocator: taking pages evicts cached prefixes when none is free.

Only this class moves pages between the pool, the tree and the `GroupPages` of further KV groups. With `share` off
(`--disable-radix-cache`) the tree stays empty and every request owns all its pages.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bough.core.plan import IntArray, Limits
from bough.core.settings import MemorySettings
from bough.memory.tree.audit import Audit, audit_pages
from bough.memory.tree.events import DEVICE, KVEvent
from bough.memory.tree.groups import GroupPages
from bough.memory.tree.node import Node, path_to
from bough.memory.tree.pool import PagePool
from bough.memory.tree.snapshot import snapshot, tokens_of
from bough.memory.tree.tree import Match, RadixTree, names_of

Copies = list[tuple[int, IntArray, IntArray]]  # group, pages that are elsewhere, pages here that get their content


class PrefixCache:
    """Counts are in pages, of full attention where nothing else is said."""

    tiered = False
    behind = False  # whether copies to lower tiers are to be made yet, or to end, by further calls of `copy_out`
    run_tokens = sys.maxsize  # of which the last whole ones of a prompt end a chunk, so that its state there is kept
    tokens_per_s: float | None = None  # at which prompts are computed, as far as is known
    load_s = 0.0  # that the copies take which the last `fetch` has begun

    def __init__(
        self,
        limits: Limits,
        memory: MemorySettings,
        on_event: Callable[[KVEvent], None] | None = None,
        medium: str = DEVICE,
    ) -> None:
        self.page_size = limits.page_size
        self.share = not (memory.disable_radix_cache or limits.whole_prompts)
        self.pool = PagePool(limits.pages[0])
        further = zip(limits.groups[1:], limits.pages[1:], strict=True)
        self.groups = tuple(GroupPages(group, pages, limits.page_size) for group, pages in further)
        self.tree = RadixTree(limits.page_size, memory.radix_eviction_policy, on_event, self.groups, medium)
        self.evicted = 0  # since the start
        self.undrafted = np.zeros(1 + limits.pages[0], dtype=np.bool_)  # pages without a draft model's part: `Drafting`
        self._pins: dict[Hashable, Node] = {}  # what stays though no request reads it, the oldest first

    @property
    def available(self) -> int:
        return self.pool.free + self.tree.evictable_pages

    @property
    def growth(self) -> int:
        """How many pages rows could grow by, in every group."""
        windows = [group.available for group in self.groups if not group.is_state]
        return min(self.available, *windows) if windows else self.available

    @property
    def used_tokens(self) -> int:
        """Tokens that running requests hold; cached prefixes that nobody reads do not count."""
        return (self.pool.total - self.available) * self.page_size

    def take(self, count: int) -> IntArray:
        """`count` pages; the caller has checked `available`."""
        short = count - self.pool.free
        if short > 0:
            evicted = self._evict(short)
            self.evicted += len(evicted)
            self.pool.give(evicted)
        return self.pool.take(count)

    def match_and_lock(self, tokens: IntArray, namespace: str, *, touch: bool = True) -> Match:
        """The longest cached prefix, protected from eviction: until `unlock`, or until the row that begins with it is
        released. With `touch` it counts as used."""
        match = self.tree.match(tokens if self.share else tokens[:0], namespace, touch=touch)
        self.tree.lock(match.node)
        for group, pages in zip(self.groups, match.group_pages, strict=True):
            group.hold(pages[pages > 0])
        return match

    def unlock(self, match: Match) -> None:
        self.tree.unlock(match.node)
        for group, pages in zip(self.groups, match.group_pages, strict=True):
            group.release(pages[pages > 0])

    def pin(self, name: Hashable, tokens: IntArray, namespace: str) -> None:
        """Keeps what the tree has of these tokens, until `unpin` or until its pages are needed."""
        self._pins[name] = self.tree.match(tokens if self.share else tokens[:0], namespace, touch=False).node
        self.tree.lock(self._pins[name])

    def unpin(self, name: Hashable) -> None:
        if (node := self._pins.pop(name, None)) is not None:
            self.tree.unlock(node)

    def yield_pins(self, needed: int) -> None:
        """Gives up pins, the oldest first, until so many pages are available."""
        while self._pins and self.growth < needed:
            self.unpin(next(iter(self._pins)))

    def pinned_pages(self) -> int:
        nodes = {node for pin in self._pins.values() for node in path_to(pin)}
        return sum(len(node.pages) for node in nodes)

    # What was computed elsewhere: pages of another tier, or of another engine.

    def lacking(self, tokens: IntArray, namespace: str, offered: Sequence[IntArray]) -> tuple[IntArray, list[IntArray]]:
        """The first pages that the tree has for these tokens; and of each group where among the pages of the tokens
        something is `offered` (0: nothing) that the tree has not."""
        present, *of_groups = self.tree.pages_of(tokens, namespace)
        places = [np.arange(len(present), len(offered[0]))]
        for own, given in zip(of_groups, offered[1:], strict=True):
            missing = given > 0
            missing[: len(present)] &= own == 0
            places.append(np.flatnonzero(missing))
        return present, places

    def place(
        self, tokens: IntArray, namespace: str, offered: Sequence[IntArray], *, whole: bool = False, priority: int = 0
    ) -> Copies:
        """Puts pages for what is `offered` of these tokens, and lacking, into the tree: as far as there is room or, if
        it is to be `whole`, all or none. The caller fills them."""
        tree, size = self.tree, self.page_size
        tokens = tokens[: len(offered[0]) * size]
        present, places = self.lacking(tokens, namespace, offered)
        known = len(present)
        node = tree.insert(tokens[: known * size], present, namespace).node
        tree.lock(node)  # taking pages must not evict the prefix before them
        count, copies, of_groups = min(len(offered[0]), known + self.available), Copies(), list[IntArray]()
        room = self.available, *(group.available for group in self.groups)
        if not whole or all(len(at) <= free for at, free in zip(places, room, strict=True)):
            own = np.sort(self.take(count - known))  # neighbours cross the bus together
            self.undrafted[own] = False  # as far as is known: what they had before is gone
            copies.append((0, offered[0][known:count], own))
            for index, group in enumerate(self.groups, 1):
                at = places[index]
                at = at[(at < count) & (at >= min(known, group.first_read(count)))]  # as nobody has needed it since
                at = at[max(0, len(at) - group.available) :]
                taken = np.zeros(count, dtype=np.int32)
                taken[at] = group.take(len(at))
                copies.append((index, offered[index][at], taken[at]))
                of_groups.append(taken)
            pages = np.concatenate([present, own])
            tree.insert(tokens[: count * size], pages, namespace, priority=priority, group_pages=of_groups)
        tree.unlock(node)
        for group, taken in zip(self.groups, of_groups, strict=False):
            group.release(taken[taken > 0])
        return [copy for copy in copies if len(copy[1])]

    # For tiers below (`TieredCache`); here there is none.

    def note(self, tokens: IntArray, namespace: str, ended: Node | None = None) -> None:
        """The tree has these tokens, as soon as the plan in the making has run; or they are all that it has of a
        request that ends, up to this node, while none is in the making."""

    def launched(self) -> None:
        """Every plan that was made has been launched."""

    def copy_out(self, resting: bool) -> None:
        """Time for copies: a plan has been launched, or (`resting`) none will soon be."""

    def fetch(self, match: Match, tokens: IntArray, namespace: str, tokens_per_s: float | None) -> Match:
        """What the match of a request that can begin becomes with what lower tiers have of its tokens, if that takes
        no longer than to compute them, at so many per second."""
        return match

    @property
    def figures(self) -> dict[str, float]:
        return {
            "num_used_tokens": self.used_tokens,
            "max_total_num_tokens": self.pool.total * self.page_size,
            "cached_prefix_tokens": self.tree.total_pages * self.page_size,
            "num_evicted_tokens": self.evicted * self.page_size,
        }

    def show(self, limit: int, node: tuple[int, int] | None, readers: Iterable[tuple[int, Node]]) -> dict[str, Any]:
        """The tree for people who watch it, with the requests that read it; or the tokens of one of its nodes."""
        if node is not None:
            return {"ids": tokens_of(self.tree, *node, limit)}
        figures = {"used_tokens": self.used_tokens, "total_tokens": self.pool.total * self.page_size}
        return figures | snapshot(self.tree, limit, readers)

    def _evict(self, count: int) -> IntArray:
        return self.tree.evict(count)

    def flush(self) -> None:
        """Forgets every prefix that nobody reads, pinned or not."""
        self.yield_pins(self.pool.total + 1)
        self.pool.give(self.tree.reset())

    def forget(self, tokens: IntArray, namespace: str) -> None:
        """Nobody may read what was computed of these tokens."""
        self.pool.give(self.tree.forget(tokens, namespace))

    def audit(self, held: Mapping[str, IntArray], group_held: Sequence[Mapping[str, IntArray]]) -> Audit:
        """Compares the books of all owners with the pages that rows own; those of further groups for each group."""
        audit = audit_pages(self.pool, self.tree, held)
        for index, (group, of_group) in enumerate(zip(self.groups, group_held, strict=True)):
            audit.problems.extend(group.check(of_group, names_of(self.tree.nodes(), index)))
        return audit


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
