"""Forks and joins: branches go on from where the parent was, run at the same time, and fail alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bough as sgl
from bough.core.errors import RequestError
from bough.lang.backends.base import GenRequest
from tests.fakes.lang_backend import ScriptedBackend


def last_word(request: GenRequest) -> str:
    return f"<{request.text.split()[-1]}>"


def refuse_bad(request: GenRequest) -> str:
    if request.text.endswith("bad"):
        raise RequestError("bad text")
    return last_word(request)


def test_branches_share_what_was_written_and_gather_their_variables() -> None:
    @sgl.function
    def tree(s: Any) -> None:
        s += "root " + sgl.gen("start")
        branches = s.fork(3)
        branches += lambda i: f" b{i}"
        branches += sgl.gen("leaf")
        branches += [" x", " y", " z"]
        branches[1] += sgl.gen("extra")
        branches.join()
        s += " end"

    backend = ScriptedBackend(last_word)
    state = tree.run(backend=backend)
    assert state["leaf"] == ["<b0>", "<b1>", "<b2>"] and state["extra"] == ["<y>"] and state["start"] == "<root>"
    assert state.text() == "root <root> end"
    assert {request.text for request in backend.requests} >= {f"root <root> b{i}" for i in range(3)}
    assert state.get_usage().requests == 5


def test_branches_reach_the_back_end_together() -> None:
    gate = threading.Event()
    backend = ScriptedBackend(last_word, gate=gate)

    @sgl.function
    def wide(s: Any) -> None:
        s += "root"
        branches = s.fork(50)
        branches += sgl.gen("leaf")
        while backend.open < 50:  # none is answered before all are there
            threading.Event().wait(0.001)
        gate.set()
        branches.join()

    assert len(wide.run(backend=backend)["leaf"]) == 50 and backend.most_open == 50


def test_texts_of_branches_can_be_appended() -> None:
    @sgl.function
    def both(s: Any) -> None:
        s += "a"
        branches = s.fork(2)
        branches += lambda i: f" {i}" + sgl.gen()
        branches.join("concate_and_append")
        s += " z"

    assert both.run(backend=ScriptedBackend(last_word)).text() == "a 0<0> 1<1> z"


def test_a_branch_reads_variables_that_its_parent_still_waits_for() -> None:
    @sgl.function
    def early(s: Any) -> None:
        s += "a" + sgl.gen("x")
        (branch,) = s.fork()
        s["seen"] = branch["x"]
        branch["x"] = "other"
        assert s["x"] == "<a>"

    assert early.run(backend=ScriptedBackend(last_word))["seen"] == "<a>"


def test_a_failed_branch_leaves_its_siblings_alone() -> None:
    @sgl.function
    def mixed(s: Any) -> None:
        branches = s.fork(3)
        branches += [" good", " bad", " fine"]
        branches += sgl.gen("leaf")
        branches += " more" + sgl.gen("last")
        s["errors"] = [branch.error() for branch in branches]
        s["good"] = [branches[i]["last"] for i in (0, 2)]
        branches.join()

    with pytest.raises(sgl.ProgramError, match=r"mixed.*test_lang_branches.py:\d+ in mixed.*bad text") as caught:
        mixed.run(backend=ScriptedBackend(refuse_bad))
    state: Any = caught.value.state
    assert [error is None for error in state["errors"]] == [True, False, True] and state["good"] == ["<more>"] * 2
    assert caught.value.text == " bad" and isinstance(caught.value.__cause__, RequestError)


def test_branches_of_a_failed_parent_fail_too() -> None:
    @sgl.function
    def doomed(s: Any) -> None:
        s += "bad" + sgl.gen("x")
        branches = s.fork(2)
        branches += "more" + sgl.gen("y")
        late = branches[0].fork(2)
        late += sgl.gen("z")
        _ = late[1]["z"]

    with pytest.raises(sgl.ProgramError, match="bad text"):
        doomed.run(backend=ScriptedBackend(refuse_bad))


def test_a_run_waits_for_branches_that_nobody_reads_and_gives_up_those_of_a_failed_state() -> None:
    @sgl.function
    def scatter(s: Any, start: str) -> None:
        branches = s.fork(2)
        branches += " good" + sgl.gen("x")
        deeper = branches[0].fork(2)
        deeper += " deep" + sgl.gen("y")
        s += start + sgl.gen("z")

    backend = ScriptedBackend(refuse_bad)
    assert scatter.run("a", backend=backend).get_usage().requests == 5 and backend.open == 0
    stuck = ScriptedBackend(gate=threading.Event())  # answers nobody

    @sgl.function
    def abandon(s: Any) -> None:
        branches = s.fork(1)
        branches += "b" + sgl.gen("x")
        while not stuck.open:
            threading.Event().wait(0.001)
        s += sgl.user_end()

    with pytest.raises(sgl.ProgramError, match="cannot end here"):
        abandon.run(backend=stuck)


def test_wrong_forks_and_joins_are_refused() -> None:
    @sgl.function
    def wrong(s: Any, what: str) -> None:
        if what == "size":
            s.fork(0)
        branches = s.fork(2)
        if what == "list":
            branches += ["one"]
        if what == "replace":
            branches[0] = s
        branches.join("sideways")

    for what, words in {"size": "at least one", "list": "1 expressions", "replace": "replaced", "": "sideways"}.items():
        with pytest.raises(sgl.ProgramError, match=words):
            wrong.run(what, backend=ScriptedBackend())


@given(st.recursive(st.text("ab", max_size=2), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=12))
def test_any_tree_of_branches_writes_what_its_path_says(tree: Any) -> None:
    """A leaf is text and a generation; a list is a fork. Each leaf's request is the texts on its path."""
    backend = ScriptedBackend(lambda request: "!")
    expected: list[str] = []

    def grow(s: Any, node: Any, path: str) -> None:
        s += "."
        if isinstance(node, str):
            s += node + sgl.gen("leaf")
            expected.append(f"{path}.{node}")
            return
        for branch, child in zip(s.fork(len(node)), node, strict=True):
            grow(branch, child, f"{path}.")

    @sgl.function
    def program(s: Any) -> None:
        grow(s, tree, "")

    program.run(backend=backend)
    assert sorted(request.text for request in backend.requests) == sorted(expected)
