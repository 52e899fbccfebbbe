"""Tracing: the graph of a program without a model, its constant beginning, and pictures of it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import bough as sgl
from bough.lang.chat import FORMATS
from bough.lang.tracer import trace_start
from tests.fakes.lang_graph import nodes_of


@sgl.function
def tips(s: Any, topic: str, count: int = 2) -> None:
    s += sgl.system("Be brief.") + sgl.user(f"Tips on {topic}?")
    with s.assistant():
        s += sgl.gen("list", max_tokens=8)
    branches = s.fork(count)
    branches += lambda i: f"Tip {i} of {s['list']}: " + sgl.gen("tip", stop="\n")
    branches.join()
    with s.var_scope("end"):
        s += "So: " + sgl.select("best", choices=["0", "1"])


def test_the_graph_shows_what_happens_in_each_state() -> None:
    graph = tips.trace()
    assert graph.stopped is None
    assert graph.pretty() == "\n".join(
        [
            "tips(topic, count)",
            "  begin    system",
            "  text     'Be brief.'",
            "  end      system",
            "  begin    user",
            "  text     'Tips on '",
            "  argument topic",
            "  text     '?'",
            "  end      user",
            "  begin    assistant",
            "  gen      list  (max_new_tokens=8)",
            "  end      assistant",
            "  fork     2",
            "    [0]",
            "      text     'Tip 0 of '",
            "      variable list",
            "      text     ': '",
            "      gen      tip  (stop='\\n')",
            "    [1]",
            "      text     'Tip 1 of '",
            "      variable list",
            "      text     ': '",
            "      gen      tip  (stop='\\n')",
            "  join     gather_variable",
            "  scope    end",
            "  text     'So: '",
            "  select   best  (0 | 1)",
            "  scope end end",
        ]
    )


def test_given_arguments_are_used_and_unknown_ways_end_the_graph() -> None:
    @sgl.function
    def ask(s: Any, questions: list[str]) -> None:
        s += "Hello. "
        for question in questions:
            s += question + sgl.gen("a")
        if "yes" in s["a"]:
            s += "never known"

    open_graph = ask.trace()
    assert open_graph.stopped == "depends on the value of argument 'questions'"
    assert open_graph.pretty().endswith("text     'Hello. '\n  … depends on the value of argument 'questions'")
    given = ask.trace(questions=["a?", "b?"])
    assert [node.kind for node in nodes_of(given.lane)] == ["text", "text", "gen", "text", "gen"]
    assert given.stopped == "depends on the value of variable 'a'"


def test_a_body_that_stumbles_over_placeholders_is_followed_up_to_there() -> None:
    @sgl.function
    def odd(s: Any, n: Any) -> None:
        s += "a"
        raise ValueError(f"what is {n}?")

    assert odd.trace().stopped == "ValueError: what is <n>?"


def test_the_start_stops_at_the_model_and_runs_nothing_behind_it() -> None:
    called: list[str] = []

    @sgl.function
    def tool(s: Any, question: str, hint: str) -> None:
        s += sgl.system("Use tools.") + sgl.user(f"First {hint}, then {question}")
        s += sgl.assistant(sgl.gen("thought"))
        called.append(s["thought"])

    start = trace_start(tool, {})
    assert start.text(FORMATS["chatml"]) == ("<|im_start|>system\nUse tools.<|im_end|>\n<|im_start|>user\nFirst ")
    assert start.arguments == ["hint", "question"] and called == []
    assert start.rank({"question": "q", "hint": "h"}) == ("h", "q")


def test_pictures_are_well_formed_and_hold_every_step() -> None:
    graph = tips.trace(topic='<b>"cats"</b>')
    root = ElementTree.fromstring(graph.to_svg())
    boxes = root.findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == len(list(nodes_of(graph.lane))) + 1
    assert len({(box.get("x"), box.get("y")) for box in boxes}) == len(boxes)  # none hides another
    dot = graph.to_dot()
    assert dot.startswith("digraph program {") and dot.count("label=") == len(boxes) and "style=dashed" in dot


def test_programs_inside_programs_are_traced() -> None:
    @sgl.function
    def outer(s: Any) -> None:
        tips(s, "cats", count=1)

    assert [node.kind for node in nodes_of(outer.trace().lane)].count("gen") == 2
