"""Routing by what workers announce of their caches, and by text where that is not known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.gateway.policies.kv_events import STEP, KVEventsPolicy, PromptBook
from bough.memory.tree.events import BlockRemoved, BlockStored
from tests.fakes.routing import fleet, request

SYSTEM = "You are a careful assistant who answers in one sentence. " * 20
IDS = tuple(range(len(SYSTEM) // 4))
HASHES = tuple(1000 + n for n in range(len(IDS)))


def policy_where(holder: str, *others: str) -> KVEventsPolicy:
    """`holder` has announced the system prompt, the others nothing."""
    policy = KVEventsPolicy(seed=0)
    policy.tick(100.0)
    for other in others:
        policy.restart(other)
    policy.observe(holder, BlockStored(HASHES, None, IDS, 1))
    return policy


def test_ids_in_the_request_find_the_worker_that_holds_them() -> None:
    policy = policy_where("b", "a", "c")
    choice = policy.choose(fleet(0, 5, 0), request("1 2 3", ids=[*IDS, *range(9000, 9000 + len(IDS))]))
    assert choice.worker_id == "b" and choice.expected_cached == pytest.approx(0.5)


def test_a_removal_is_believed() -> None:
    policy = policy_where("b", "a", "c")
    policy.observe("b", BlockRemoved(HASHES))
    assert policy.choose(fleet(0, 5, 1), request("ids", ids=IDS)).worker_id == "a"


def test_a_text_whose_ids_were_learned_finds_them_in_the_cache() -> None:
    policy = policy_where("b", "a", "c")
    policy.learn(SYSTEM, IDS)
    choice = policy.choose(fleet(0, 5, 0), request(SYSTEM + "What is a tree?"))
    assert choice.worker_id == "b"
    assert choice.expected_cached > 0.8


def test_evicted_text_is_not_looked_for_where_it_was_sent() -> None:
    """What sets it apart from `cache_aware`, which would still send it to b."""
    policy = policy_where("b", "a", "c")
    policy.routed("b", request(SYSTEM))
    policy.learn(SYSTEM, IDS)
    policy.observe("b", BlockRemoved(HASHES))
    policy.tick(200.0)
    assert policy.choose(fleet(0, 1, 1), request(SYSTEM)).worker_id == "a"


def test_what_was_just_sent_counts_before_its_event_has_come() -> None:
    policy = KVEventsPolicy(seed=0)
    policy.tick(100.0)
    for name in "abc":
        policy.restart(name)
    policy.routed("b", request(SYSTEM))
    assert policy.choose(fleet(0, 1, 0), request(SYSTEM)).worker_id == "b"
    policy.learn(SYSTEM, IDS)
    assert policy.choose(fleet(0, 1, 0), request(SYSTEM)).worker_id == "b"
    policy.tick(106.0)
    assert policy.choose(fleet(0, 1, 1), request(SYSTEM)).worker_id == "a"


def test_without_ids_the_text_decides() -> None:
    policy = policy_where("b", "a", "c")
    policy.routed("c", request(SYSTEM))
    policy.tick(500.0)
    assert policy.choose(fleet(0, 0, 1), request(SYSTEM)).worker_id == "c"


def test_workers_that_publish_nothing_are_known_by_text() -> None:
    policy = policy_where("b")
    policy.learn(SYSTEM, IDS)
    policy.routed("c", request(SYSTEM + "x" * 200))
    policy.tick(500.0)
    assert policy.cached(request(SYSTEM + "x" * 200)).keys() == {"b", "c"}
    assert policy.choose(fleet(0, 0, 1), request(SYSTEM + "x" * 200)).worker_id == "c"


def test_it_is_curious_about_what_it_has_not_learned() -> None:
    policy = KVEventsPolicy(seed=0)
    assert policy.curious(request(SYSTEM))
    policy.learn(SYSTEM, IDS)
    assert not policy.curious(request(SYSTEM)) and not policy.curious(request(SYSTEM + "short"))
    assert policy.curious(request(SYSTEM + "y" * 300))
    assert not policy.curious(request("any", ids=[1]))


def test_a_removed_worker_is_forgotten() -> None:
    policy = policy_where("b", "a")
    policy.removed("b")
    assert policy.choose(fleet(0, 1), request("i", ids=IDS)).worker_id == "a"


@given(common=st.integers(0, 5), tail=st.text(alphabet="ab", max_size=300))
@settings(deadline=None, max_examples=40)
def test_the_book_finds_the_ids_of_the_shared_beginning(common: int, tail: str) -> None:
    book = PromptBook()
    base = "".join(chr(97 + n % 26) for n in range(5 * STEP))
    book.learn(base, list(range(len(base))))  # a token per character, so proportions are exact
    found = book.find(base[: common * STEP] + "Z" + tail)
    assert (found.chars if found else 0) == common * STEP
    assert (len(found.ids) if found else 0) == 4 * common * STEP
    whole = book.find(base)
    assert whole is not None and whole.chars == len(base)


def test_the_book_forgets_what_was_unused_for_longest() -> None:
    book = PromptBook(most=2)
    book.learn("one", [1])
    book.learn("two", [2])
    assert book.find("one") is not None
    book.learn("three", [3])
    assert book.find("two") is None and book.find("one") is not None


def test_prompts_that_share_all_but_their_end_keep_a_bounded_number_of_ids() -> None:
    """Each has a page of its own, which alone would keep the ids of the whole prompt."""
    ids = list(range(1000))
    book = PromptBook(most_bytes=40_000)  # the ids of ten such prompts
    for number in range(100):
        book.learn(SYSTEM * 4 + str(number) * STEP, ids)
    kept = {id(prompt): len(prompt.ids) for prompt, _ in book._pages.values()}
    assert sum(kept.values()) == book._bytes <= 40_000
    newest = book.find(SYSTEM * 4 + "99" * STEP)
    assert newest is not None and newest.chars > len(SYSTEM) * 4
