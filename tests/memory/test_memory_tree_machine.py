"""Random lives of tree and pool against a model too simple to be wrong: a dictionary from prefixes to pages.

The alphabet is tiny, so that prefixes meet and nodes split all the time. After every step the tree and the pool audit
themselves, the tree holds exactly the model's prefixes, and a subscriber that only saw the events knows them too.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bough.core.plan import IntArray
from bough.memory.tree.audit import audit_pages
from bough.memory.tree.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, hash_blocks
from bough.memory.tree.eviction import POLICIES
from bough.memory.tree.node import Node, key_of
from bough.memory.tree.pool import PagePool
from bough.memory.tree.tree import RadixTree

POOL_PAGES = 60

Prefix = tuple[str, tuple[int, ...]]  # namespace, tokens of whole pages

namespaces = st.sampled_from(["", "", "salt", "adapter"])


class TreeMachine(RuleBasedStateMachine):
    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(POOL_PAGES)
        self.model: dict[Prefix, int] = {}
        self.locked: list[tuple[Node, Prefix]] = []
        self.announced: set[int] = set()

    @initialize(policy=st.sampled_from(list(POLICIES)))
    def build(self, policy: str) -> None:
        self.rank = POLICIES[policy]
        self.tree = RadixTree(self.page_size, policy, self.subscribe)

    # -- what happens -----------------------------------------------------------------------------------------------

    @rule(data=st.data(), namespace=namespaces, priority=st.integers(-1, 2))
    def insert_own_pages(self, data: st.DataObject, namespace: str, priority: int) -> None:
        """A caller that never matched: all it offers is its own, and duplicates go back."""
        key = self.draw_key(data)
        count = len(key) // self.page_size
        if count > self.pool.free:
            return
        self.insert(key, self.pool.take(count), namespace, priority)

    @rule(data=st.data(), namespace=namespaces, priority=st.integers(-1, 2))
    def serve(self, data: st.DataObject, namespace: str, priority: int) -> None:
        """A request: match, lock, evict for the rest, insert, and hold on to the result."""
        key = self.draw_key(data)
        found = self.tree.match(key, namespace)
        prefix = self.prefixes(key, namespace)
        self.tree.lock(found.node)
        missing = len(prefix) - len(found.pages)
        if missing > self.pool.free:
            self.evict(missing - self.pool.free)
        if missing <= self.pool.free:
            own = np.concatenate([found.pages, self.pool.take(missing)])
            node = self.insert(key, own, namespace, priority)
            if prefix:
                self.tree.lock(node)
                self.locked.append((node, prefix[-1]))
        self.tree.unlock(found.node)

    @rule(data=st.data(), namespace=namespaces, touch=st.booleans(), lock=st.booleans())
    def match(self, data: st.DataObject, namespace: str, touch: bool, lock: bool) -> None:
        key = self.draw_key(data)
        known = [prefix for prefix in self.prefixes(key, namespace) if prefix in self.model]
        assert self.tree.match_length(key, namespace) == len(known) * self.page_size
        found = self.tree.match(key, namespace, touch=touch)
        assert found.length == len(known) * self.page_size
        assert found.pages.tolist() == [self.model[prefix] for prefix in known]
        (pages,) = self.tree.pages_of(key, namespace)
        assert pages.tolist() == found.pages.tolist()
        if lock and known:
            self.tree.lock(found.node)
            self.locked.append((found.node, known[-1]))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.tree.unlock(node)

    @rule(n=st.integers(0, 12))
    def evict_some(self, n: int) -> None:
        self.evict(n)

    @rule()
    def evict_one_of_the_lowest_rank(self) -> None:
        """The queue's choice must be that of a full scan."""
        leaves = [node for node in self.tree.nodes() if node.evictable]
        best = min((self.rank(leaf) for leaf in leaves), default=None)
        allowed = {int(leaf.pages[-1]) for leaf in leaves if self.rank(leaf) == best}
        freed = self.evict(1)
        assert set(freed.tolist()) <= allowed and len(freed) == min(1, len(leaves))

    @rule()
    def reset(self) -> None:
        dropped = self.tree.reset()
        assert self.tree.evictable_pages == 0
        self.forget(dropped)

    # -- what must always hold --------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        audit = audit_pages(self.pool, self.tree, {})
        assert audit.problems == [] and len(audit.leaked) == 0
        assert sorted(self.tree.pages_in_use().tolist()) == sorted(self.model.values())
        protected = {prefix for _, end in self.locked for prefix in self.prefixes(np.array(end[1]), end[0])}
        assert protected <= self.model.keys()
        assert self.tree.protected_pages == len(protected)
        assert self.tree.total_pages == len(self.model)

    @invariant()
    def held_nodes_end_where_they_did(self) -> None:
        for node, (namespace, tokens) in self.locked:
            assert self.tree.match(np.array(tokens, dtype=np.int32), namespace, touch=False).node is node

    @invariant()
    def subscriber_knows_the_cached_blocks(self) -> None:
        assert self.announced == {self.block_hash(prefix) for prefix in self.model}

    # -- the model --------------------------------------------------------------------------------------------------

    def draw_key(self, data: st.DataObject) -> IntArray:
        return np.array(self.draw_known(data) + data.draw(st.lists(st.integers(0, 1), max_size=8)), dtype=np.int32)

    def draw_known(self, data: st.DataObject) -> list[int]:
        """Nothing or, as often, the tokens of a cached prefix: chance alone would seldom reach the end of a leaf."""
        known = sorted({tokens for _, tokens in self.model if len(tokens) <= 8 * self.page_size})
        if not known or data.draw(st.booleans()):
            return []
        return list(data.draw(st.sampled_from(known)))

    def prefixes(self, key: IntArray, namespace: str) -> list[Prefix]:
        ends = range(self.page_size, len(key) + 1, self.page_size)
        return [(namespace, tuple(key[:end].tolist())) for end in ends]

    def insert(self, key: IntArray, own: IntArray, namespace: str, priority: int) -> Node:
        prefixes = self.prefixes(key, namespace)
        before = sum(prefix in self.model for prefix in prefixes)
        inserted = self.tree.insert(key, own, namespace, priority=priority)
        for prefix, page in zip(prefixes, own.tolist(), strict=True):
            self.model.setdefault(prefix, page)
        assert inserted.existing == before * self.page_size
        assert inserted.pages.tolist() == [self.model[prefix] for prefix in prefixes]
        self.pool.give(own[own != inserted.pages])
        return inserted.node

    def evict(self, n: int) -> IntArray:
        expected = min(n, self.tree.evictable_pages)
        seen: list[int] = []

        def before(leaf: Node) -> None:
            """A leaf that is about to lose pages is still whole, and tells its key."""
            tokens, namespace = key_of(leaf)
            pages = [self.model[prefix] for prefix in self.prefixes(tokens, namespace)]
            assert pages[len(pages) - len(leaf.pages) :] == leaf.pages.tolist()
            seen.extend(leaf.pages.tolist())

        freed = self.tree.evict(n, before)
        assert len(freed) == expected and set(freed.tolist()) <= set(seen)
        self.forget(freed)
        return freed

    def forget(self, pages: IntArray) -> None:
        self.pool.give(pages)
        gone = set(pages.tolist())
        self.model = {prefix: page for prefix, page in self.model.items() if page not in gone}
        for namespace, tokens in self.model:
            parent = (namespace, tokens[: -self.page_size])
            assert not parent[1] or parent in self.model, "a prefix was dropped before what continues it"

    def subscribe(self, event: KVEvent) -> None:
        match event:
            case BlockStored():
                assert event.parent_block_hash is None or event.parent_block_hash in self.announced
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                assert self.announced.isdisjoint(event.block_hashes)
                self.announced.update(event.block_hashes)
            case BlockRemoved():
                assert self.announced.issuperset(event.block_hashes)
                self.announced.difference_update(event.block_hashes)
            case AllBlocksCleared():
                self.announced.clear()

    def block_hash(self, prefix: Prefix) -> int:
        namespace, tokens = prefix
        whole = np.array(tokens, dtype=np.int32).tobytes()
        return hash_blocks(whole, 4 * self.page_size, None, namespace)[-1]


class PagedTreeMachine(TreeMachine):
    page_size = 4

    def draw_key(self, data: st.DataObject) -> IntArray:
        """Most pages are one of two, so that whole pages are shared; some tokens and a ragged end come on top."""
        pages = data.draw(st.lists(st.sampled_from([(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0)]), max_size=8))
        rest = data.draw(st.lists(st.integers(0, 1), max_size=3))
        return np.array(self.draw_known(data) + [token for page in pages for token in page] + rest, dtype=np.int32)


@pytest.mark.parametrize("machine", [TreeMachine, PagedTreeMachine])
def test_random_lives(machine: type[TreeMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
