"""The radix tree over texts against a plain list of who was sent what."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.gateway.policies.text_tree import TextTree, common_length
from tests.fakes.text_trees import check, nodes, size

TEXTS = st.text(alphabet="ab🌳", max_size=12)
WORKERS = st.sampled_from(["x", "y", "z"])


def shared(left: str, right: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize(
    ("left", "right", "start", "same"),
    [("", "abc", 0, 0), ("abc", "abc", 0, 3), ("abc", "ab", 0, 2), ("bcx", "abcd", 1, 2), ("x", "abc", 3, 0)],
)
def test_common_length(left: str, right: str, start: int, same: int) -> None:
    assert common_length(left, right, start) == same


@given(left=TEXTS, right=TEXTS)
@settings(deadline=None)
def test_common_length_is_that_of_the_common_prefix(left: str, right: str) -> None:
    assert common_length(left, right, 0) == shared(left, right)


@given(sent=st.lists(st.tuples(TEXTS, WORKERS), max_size=20), asked=TEXTS)
@settings(deadline=None)
def test_a_worker_holds_the_longest_prefix_it_was_ever_sent(sent: list[tuple[str, str]], asked: str) -> None:
    tree = TextTree()
    expected: dict[str, int] = {}
    for text, worker in sent:
        tree.insert(text, worker)
        same = shared(text, asked)
        if same:
            expected[worker] = max(same, expected.get(worker, 0))
    check(tree)
    assert tree.match(asked) == expected


@given(sent=st.lists(st.tuples(TEXTS, WORKERS), max_size=20), most=st.integers(0, 30), gone=WORKERS)
@settings(deadline=None)
def test_eviction_and_removal_keep_the_accounts(sent: list[tuple[str, str]], most: int, gone: str) -> None:
    tree = TextTree()
    for text, worker in sent:
        tree.insert(text, worker)
    before = {worker: size(tree, worker) for worker in "xyz"}
    tree.evict(most)
    check(tree)
    for worker in "xyz":
        assert size(tree, worker) <= most
        assert before[worker] > most or size(tree, worker) == before[worker]
    tree.remove(gone)
    check(tree)
    assert all(gone not in node.holders for node in nodes(tree))


def test_the_text_sent_longest_ago_goes_first() -> None:
    tree = TextTree()
    for text in ("system: one", "system: two", "other", "system: one"):
        tree.insert(text, "x")
    tree.evict(11)
    assert tree.match("other") == {}
    assert tree.match("system: two") == {"x": len("system: ")}
    assert tree.match("system: one") == {"x": len("system: one")}


def test_one_workers_eviction_leaves_the_others_alone() -> None:
    tree = TextTree()
    tree.insert("shared, and more", "x")
    tree.insert("shared", "y")
    tree.evict(6)
    assert tree.match("shared, and more") == {"x": 6, "y": 6}


def test_only_what_was_sent_since_a_time_counts() -> None:
    tree = TextTree()
    tree.insert("hello", "x", now=10.0)
    tree.insert("hello", "y", now=20.0)
    assert tree.match("hello there", since=15.0) == {"y": 5}


@given(sent=st.lists(st.tuples(TEXTS, WORKERS), max_size=30), most=st.integers(0, 6))
@settings(deadline=None)
def test_nodes_are_bounded_as_well_as_characters(sent: list[tuple[str, str]], most: int) -> None:
    tree = TextTree(most_nodes=most)
    for text, worker in sent:
        tree.insert(text, worker)
        tree.evict(1000)
        check(tree)
        assert all(sum(worker in node.holders for node in nodes(tree)) <= most for worker in "xyz")
