from __future__ import annotations

import builtins
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import FakeEngine, run_with

from bough.cli.chat import describe
from bough.core.errors import EngineDeadError, RequestError

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def talk(monkeypatch: Patch, engine: FakeEngine, *lines: str, flags: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    return run_with(engine.make, ["chat", *flags])


def prompts(engine: FakeEngine) -> list[str]:
    return [" ".join(call["input_ids"]) for call in engine.calls]


def test_each_turn_sends_the_whole_conversation(monkeypatch: Patch, capsys: Capture) -> None:
    engine = FakeEngine(["Hi", " Ada"], ["Ada"])
    assert talk(monkeypatch, engine, "I am Ada", "", "Who am I?") == 0
    assert prompts(engine) == [
        "<user> I am Ada <assistant>",
        "<user> I am Ada <assistant> Hi Ada <user> Who am I? <assistant>",
    ]
    out = capsys.readouterr().out
    assert out.startswith("Hi Ada\n2 tokens · ")
    assert "6 of 12 prompt tokens cached" in out
    assert "\x1b" not in out and "> " not in out, "a pipe gets no colours and no prompt"
    assert engine.closed


def test_answers_may_be_long_unless_told_otherwise(monkeypatch: Patch) -> None:
    engine = FakeEngine(["x"])
    talk(monkeypatch, engine, "a")
    assert engine.calls[0]["sampling_params"] == {"max_new_tokens": 1024}


def test_commands(monkeypatch: Patch, capsys: Capture) -> None:
    engine = FakeEngine(["one"], ["two"], ["three"])
    lines = ("a", "/system Be brief.", "b", "/reset", "/system", "c", "/help", "/rest", "/nothing", "/quit", "unread")
    assert talk(monkeypatch, engine, *lines, flags=("--system", "Be kind.")) == 0
    assert prompts(engine) == [
        "<system> Be kind. <user> a <assistant>",
        "<system> Be brief. <user> a <assistant> one <user> b <assistant>",
        "<user> c <assistant>",
    ]
    out = capsys.readouterr().out
    assert "The system message was set." in out
    assert "The conversation was forgotten." in out
    assert "/system TEXT  set the system message" in out
    assert "Unknown command /rest. Did you mean /reset?" in out
    assert "Unknown command /nothing. /help lists them all." in out


def test_pictures_belong_to_the_next_message(monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
    engine = FakeEngine(["A cat"], ["Yes"], [RequestError("No.")], ["Hm"], ["What?"])
    (tmp_path / "cat.png").write_bytes(b"cat")
    url = "https://example.org/dog.png"
    pictures = (f"/image {tmp_path / 'cat.png'}", f"/image {url}")
    lines = (*pictures, "Who?", "Sure?", "/image gone.png", pictures[0], "No?", "And now?", "/reset", "Again?")
    assert talk(monkeypatch, engine, *lines) == 0
    out = capsys.readouterr().out
    assert "The next message has 2 pictures." in out and "gone.png: No such file or directory. Give the file" in out
    both = [b"cat", url]
    assert [call.get("image_data") for call in engine.calls] == [both, both, [*both, b"cat"], both, None]
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Who?"}]
    said = "<assistant> A cat <user> Sure? <assistant> Yes <user> And now? <assistant>"
    assert prompts(engine)[3] == f"<user> {parts} {said}", "a refused message and its picture are forgotten"


def test_interrupt_stops_the_answer_alone_and_keeps_what_came(monkeypatch: Patch, capsys: Capture) -> None:
    engine = FakeEngine(["Once", " upon", KeyboardInterrupt()], ["Yes"])
    assert talk(monkeypatch, engine, "story", "go on") == 0
    assert prompts(engine)[1] == "<user> story <assistant> Once upon <user> go on <assistant>"
    assert "Once upon\nStopped.\n2 tokens" in capsys.readouterr().out
    assert engine.streams_closed == 2


def test_interrupt_while_printing_closes_the_stream(monkeypatch: Patch) -> None:
    """Ctrl-C may strike outside the engine's own code; the request must be aborted all the same."""
    engine = FakeEngine(["Once", " upon"], ["Yes"])
    plain = builtins.print
    struck: list[str] = []

    def strike_once(*words: Any, **options: Any) -> None:
        if words == ("Once",) and not struck:
            struck.append("Once")
            assert engine.streams_closed == 0
            raise KeyboardInterrupt
        plain(*words, **options)

    monkeypatch.setattr(builtins, "print", strike_once)
    assert talk(monkeypatch, engine, "story", "go on") == 0
    assert struck and engine.streams_closed == 2


def test_a_refused_turn_is_forgotten_and_the_chat_goes_on(monkeypatch: Patch, capsys: Capture) -> None:
    engine = FakeEngine([RequestError("The prompt is too long.")], ["Yes"])
    assert talk(monkeypatch, engine, "long", "short") == 0
    assert prompts(engine)[1] == "<user> short <assistant>"
    assert capsys.readouterr().out.startswith("The prompt is too long.\nYes\n")


def test_a_full_context_names_the_way_out(monkeypatch: Patch, capsys: Capture) -> None:
    def too_long() -> RequestError:
        return RequestError("The prompt has 9 tokens. Shorten it.", field="input_ids")

    engine = FakeEngine([too_long()], ["Yes"], [too_long()], [RequestError("No.", field="stop")])
    assert talk(monkeypatch, engine, "long", "short", "more", "other") == 0
    first, *_, later, other = capsys.readouterr().out.splitlines()
    assert first == "The prompt has 9 tokens. Shorten it.", "there is no conversation to forget"
    assert later == "The prompt has 9 tokens. Shorten it. /reset forgets the conversation so far."
    assert other == "No."


def test_an_aborted_answer_says_why(monkeypatch: Patch, capsys: Capture) -> None:
    engine = FakeEngine(["Hel"], finish={"type": "abort", "message": "It ran too long."})
    assert talk(monkeypatch, engine, "a") == 0
    assert "Hel\nIt ran too long.\n" in capsys.readouterr().out


def test_a_dead_engine_ends_the_chat(monkeypatch: Patch, capsys: Capture) -> None:
    engine = FakeEngine([EngineDeadError("The scheduler process ended.")], ["never"])
    assert talk(monkeypatch, engine, "a", "b") == 1
    assert capsys.readouterr().err == "bough: The scheduler process ended.\n"
    assert engine.closed


def test_a_model_without_template_is_told_before_the_first_message(monkeypatch: Patch, capsys: Capture) -> None:
    engine = FakeEngine()
    engine.tokenizer = None
    assert talk(monkeypatch, engine, "a") == 1
    assert "has no chat template" in capsys.readouterr().err
    assert engine.closed


@pytest.mark.parametrize("leave", [EOFError, KeyboardInterrupt])
def test_at_a_terminal_prompt_both_keys_leave(leave: type[BaseException], monkeypatch: Patch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    entered = iter(["hello"])

    def typed(prompt: str) -> str:
        line = next(entered, None)
        if line is None:
            raise leave
        return line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(builtins, "input", typed)
    engine = FakeEngine(["Hi"])
    assert run_with(engine.make, ["chat"]) == 0
    assert len(engine.calls) == 1 and engine.closed


def test_timing_line() -> None:
    output = {"meta_info": {"completion_tokens": 21, "cached_tokens": 30, "prompt_tokens": 40}}
    assert describe(output, 0.25, 2.0) == (
        "21 tokens · 10.0 tokens/s · first after 0.25 s · 30 of 40 prompt tokens cached"
    )
    output["meta_info"]["completion_tokens"] = 1
    assert describe(output, 0.25, 0.0) == ("1 token · first after 0.25 s · 30 of 40 prompt tokens cached")
    output["meta_info"]["spec_accept_length"] = 2.345
    assert describe(output, 0.25, 0.0).endswith("30 of 40 prompt tokens cached · 2.35 tokens a step")
