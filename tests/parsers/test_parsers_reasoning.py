"""Thinking set apart from the answer, in any chunking, alone and before calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.errors import RequestError
from bough.core.settings import REASONING_PARSERS, TOOL_CALL_PARSERS
from bough.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormat,
    AnswerParser,
    Reasoning,
    Text,
    reasoning_format,
    tool_format,
)
from bough.parsers.events import Parsed
from bough.parsers.source import SPACE
from tests.parsers.test_parsers_round_trip import TOOLS, calls_in, cut, events_of

SEPARATING = [name for name, each in REASONING_FORMATS.items() if not each.shown and each.framed is None]
EITHER = pytest.mark.parametrize("name", SEPARATING)


@EITHER
@settings(deadline=None, max_examples=15)
@given(
    thought=st.sampled_from(["", "\nHmm.\n", "a < b", " \n"]),
    said=st.builds(str.__add__, st.sampled_from(["", "\n\n", " "]), st.text(max_size=8)),
    seed=st.integers(),
)
def test_thinking_is_set_apart(name: str, thought: str, said: str, seed: int) -> None:
    kind = REASONING_FORMATS[name]
    for opening, thinking in ((kind.start, False), (kind.start, True), ("", True)):
        text, form = opening + thought + kind.end + said, AnswerFormat(reasoning=kind, thinking=thinking)
        whole = form.parse(text)
        assert (whole.reasoning, whole.text) == (thought.strip(SPACE), said.lstrip(SPACE))
        assert Parsed.of(events_of(form, cut(text, seed))) == whole


@EITHER
def test_an_answer_without_thinking_is_text(name: str) -> None:
    kind = REASONING_FORMATS[name]
    form = AnswerFormat(reasoning=kind)
    assert form.parse("Hello.") == Parsed.of([Text("Hello.")])
    assert form.parse(f" \n{kind.end}Hello.").text == "Hello."
    assert form.parse(f"One writes {kind.start} before.").text == f"One writes {kind.start} before."


@EITHER
def test_thinking_that_is_cut_off_is_no_answer(name: str) -> None:
    parsed = AnswerFormat(reasoning=REASONING_FORMATS[name], thinking=True).parse("I wonder")
    assert (parsed.reasoning, parsed.text) == ("I wonder", "")


@pytest.mark.parametrize(
    ("name", "prompt", "thinks"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3-thinking", "<|im_start|>assistant\n", True),
        ("deepseek-r1", "<｜Assistant｜>", True),
        ("deepseek-r1", "<｜Assistant｜><think>\n\n</think>\n\n", False),
        ("glm45", "<|assistant|>\n<think></think>", False),
        ("mistral", "[/INST]", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
    ],
)
def test_the_prompt_tells_whether_an_answer_begins_with_thinking(name: str, prompt: str, thinks: bool) -> None:
    assert reasoning_format(name).thinks_from_start(prompt) is thinks


def test_words_that_are_continued_tell_it_better() -> None:
    kind = reasoning_format("deepseek-r1")
    assert kind.thinks_from_start("<think>so far", "<think>so far")
    assert not kind.thinks_from_start("<think>so</think>far", "<think>so</think>far")
    assert kind.thinks_from_start("far", "far")


def test_calls_beyond_the_allowed_number_are_text() -> None:
    form = AnswerFormat(tool_format=TOOL_FORMATS["hermes"], tools=TOOLS, most_calls=1)
    call = '<tool_call>{"name": "now"}</tool_call>'
    parsed = form.parse(call + call)
    assert (calls_in(parsed), parsed.text) == ([("now", {})], call)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_an_answer_of_nothing_but_blanks_or_beginnings_is_not_held_back_for_ever(name: str) -> None:
    """And what it costs is as much as what is new: this would take minutes otherwise."""
    form = AnswerFormat(reasoning=REASONING_FORMATS["qwen3"], tool_format=TOOL_FORMATS[name], tools=TOOLS)
    for text in (" " * 20_000, "[" * 5_000, "<tool_call>" * 2_000):
        parser = AnswerParser(form)
        events = [event for at in range(0, len(text), 10) for event in parser.feed(text[at : at + 10])]
        assert sum(len(event.text) for event in events if isinstance(event, Text)) > len(text) - 1000
        assert form.parse(text).text == text


def test_thinking_that_is_not_streamed_comes_at_once() -> None:
    form = AnswerFormat(reasoning=REASONING_FORMATS["qwen3"], thinking=True, stream_reasoning=False)
    assert events_of(form, ["One ", "two ", "</think>", "three"]) == [Reasoning("One two"), Text("three")]
    assert events_of(form, ["One ", "two"]) == [Reasoning("One two")]


def test_a_call_ends_thinking_that_was_not_closed() -> None:
    form = AnswerFormat(
        reasoning=REASONING_FORMATS["qwen3"], thinking=True, tool_format=TOOL_FORMATS["qwen25"], tools=TOOLS
    )
    text = 'I must look.<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for pieces in ([text], list(text)):
        parsed = Parsed.of(events_of(form, pieces))
        assert (parsed.reasoning, parsed.text, calls_in(parsed)) == ("I must look.", "", [("now", {})])


def test_thinking_before_text_and_a_call() -> None:
    form = AnswerFormat(
        reasoning=REASONING_FORMATS["deepseek-r1"], thinking=True, tool_format=TOOL_FORMATS["hermes"], tools=TOOLS
    )
    text = 'Hm.</think>\n\nLet me see.\n<tool_call>{"name": "now"}</tool_call>\nDone.'
    for pieces in ([text], list(text)):
        parsed = Parsed.of(events_of(form, pieces))
        assert (parsed.reasoning, parsed.text, calls_in(parsed)) == ("Hm.", "Let me see.Done.", [("now", {})])


HARMONY = (
    "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
    "<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
)


def test_gpt_oss_reads_thinking_text_and_calls_alike() -> None:
    both = AnswerFormat(reasoning=REASONING_FORMATS["gpt-oss"], tool_format=TOOL_FORMATS["gpt-oss"], tools=TOOLS)
    for pieces in ([HARMONY], list(HARMONY)):
        parsed = Parsed.of(events_of(both, pieces))
        assert (parsed.reasoning, parsed.text, calls_in(parsed)) == ("The user asks.", "One moment.", [("now", {})])
    calls_only = AnswerFormat(tool_format=TOOL_FORMATS["gpt-oss"], tools=TOOLS).parse(HARMONY)
    assert (calls_only.reasoning, calls_only.text) == ("", "The user asks.One moment.")
    final = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    parsed = AnswerFormat(reasoning=REASONING_FORMATS["gpt-oss"]).parse(final)
    assert (parsed.reasoning, parsed.text) == ("Easy.", "Four.")
    assert AnswerFormat(reasoning=REASONING_FORMATS["gpt-oss"]).parse("Plain.").text == "Plain."


def test_what_cuts_thinking_short() -> None:
    assert reasoning_format("qwen3").cut == "</think>"
    assert reasoning_format("gpt-oss").cut.endswith("<|channel|>final<|message|>")


def test_appended_thinking_is_shown_with_its_marker() -> None:
    form = AnswerFormat(reasoning=REASONING_FORMATS["minimax-append-think"])
    assert form.parse("Hm.</think>Yes.").text == "<think>Hm.</think>Yes."


def test_names_that_nobody_knows_are_answered_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"'qwen9'.*hermes.*qwen25") as caught:
        tool_format("qwen9", "tool_call_parser")
    assert caught.value.field == "tool_call_parser"
    with pytest.raises(RequestError, match=r"'qwen9'.*deepseek-r1.*qwen3"):
        reasoning_format("qwen9")


def test_the_settings_know_the_same_names() -> None:
    assert set(TOOL_CALL_PARSERS) == set(TOOL_FORMATS)
    assert set(REASONING_PARSERS) == set(REASONING_FORMATS)


def test_a_plain_form_leaves_text_alone() -> None:
    parser = AnswerParser(AnswerFormat())
    assert [*parser.feed("<think>x"), *parser.finish()] == [Text("<think>x")]
    assert AnswerFormat().plain
