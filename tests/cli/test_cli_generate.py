from __future__ import annotations

import io
import json
import sys

import pytest
from cli_fakes import FakeEngine, run_with

from bough.core.errors import RequestError

Capture = pytest.CaptureFixture[str]


def test_text_is_streamed_and_ends_with_a_newline(capsys: Capture) -> None:
    engine = FakeEngine([" Pa", "ris", "."])
    assert run_with(engine.make, ["generate", "The capital of France is"]) == 0
    assert capsys.readouterr().out == " Paris.\n"
    assert engine.calls == [
        {"prompt": "The capital of France is", "sampling_params": {}, "input_ids": None, "stream": True}
    ]
    assert engine.closed


def test_engine_and_sampling_flags_reach_their_places() -> None:
    engine = FakeEngine(["x"])
    flags = ["--model", "m", "--page-size", "4", "--temperature", "0", "--stop", "\n", "--log-level", "debug"]
    assert run_with(engine.make, ["generate", "a", *flags]) == 0
    assert engine.settings == {"model_path": "m", "page_size": 4, "log_level": "debug"}
    assert engine.calls[0]["sampling_params"] == {"temperature": 0.0, "stop": ["\n"]}


def test_the_engine_is_quiet_unless_asked() -> None:
    engine = FakeEngine(["x"])
    run_with(engine.make, ["generate", "a"])
    assert engine.settings == {"log_level": "warning"}


def test_chat_wraps_the_prompt_in_the_template() -> None:
    engine = FakeEngine(["x"])
    assert run_with(engine.make, ["generate", "--chat", "hello"]) == 0
    assert engine.calls[0]["prompt"] is None
    assert engine.calls[0]["input_ids"] == ["<user>", "hello", "<assistant>"]


def test_chat_needs_a_template(capsys: Capture) -> None:
    engine = FakeEngine(["x"])
    engine.tokenizer = None
    assert run_with(engine.make, ["generate", "--chat", "hello"]) == 1
    assert "fake has no chat template" in capsys.readouterr().err


def test_dash_reads_standard_input_without_its_last_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    engine = FakeEngine(["x"])
    assert run_with(engine.make, ["generate", "-"]) == 0
    assert engine.calls[0]["prompt"] == "one\ntwo"


def test_input_that_is_no_text_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert run_with(FakeEngine().make, ["generate", "-"]) == 2
    assert capsys.readouterr().err == "bough: Standard input is not UTF-8 text.\n"


@pytest.mark.parametrize(
    ("argv", "text"),
    [([], "Give a prompt"), ([""], "The prompt is empty"), (["a", "--skip-tokenizer-init"], "This command shows text")],
)
def test_unusable_prompts_start_no_engine(argv: list[str], text: str, capsys: Capture) -> None:
    engine = FakeEngine()
    assert run_with(engine.make, ["generate", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"bough: {text}")
    assert engine.settings is None


def test_json_prints_the_whole_output(capsys: Capture) -> None:
    engine = FakeEngine(["é"])
    assert run_with(engine.make, ["generate", "--json", "a"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["meta_info"]["completion_tokens"] == 1
    assert "é" in text
    assert not engine.calls[0]["stream"]


def test_no_stream_prints_once(capsys: Capture) -> None:
    engine = FakeEngine(["a", "b\n"])
    assert run_with(engine.make, ["generate", "--no-stream", "a"]) == 0
    assert capsys.readouterr().out == "ab\n"
    assert not engine.calls[0]["stream"]


def test_several_samples_are_kept_apart(capsys: Capture) -> None:
    assert run_with(FakeEngine(["one"], ["two\n"]).make, ["generate", "--n", "2", "a"]) == 0
    assert capsys.readouterr().out == "--- 1 of 2\none\n--- 2 of 2\ntwo\n"


def test_several_samples_as_json_are_a_list(capsys: Capture) -> None:
    assert run_with(FakeEngine(["one"], ["two"]).make, ["generate", "--n", "2", "--json", "a"]) == 0
    assert [output["text"] for output in json.loads(capsys.readouterr().out)] == ["one", "two"]


def test_raw_adds_and_hides_nothing(capsys: Capture) -> None:
    engine = FakeEngine(["x", "<end>"])
    assert run_with(engine.make, ["generate", "--raw", "a"]) == 0
    assert capsys.readouterr().out == "x<end>"
    assert engine.calls[0]["sampling_params"] == {"skip_special_tokens": False, "no_stop_trim": True}


@pytest.mark.parametrize("flags", [[], ["--no-stream"]])
def test_an_answer_cut_short_shows_what_there_is_and_why(flags: list[str], capsys: Capture) -> None:
    engine = FakeEngine(["Hel"], finish={"type": "abort", "message": "It ran too long."})
    assert run_with(engine.make, ["generate", *flags, "a"]) == 1
    seen = capsys.readouterr()
    assert (seen.out, seen.err) == ("Hel\n", "bough: It ran too long.\n")


def test_a_refused_request_is_told(capsys: Capture) -> None:
    assert run_with(FakeEngine([RequestError("The prompt is too long.")]).make, ["generate", "a"]) == 1
    assert capsys.readouterr().err == "bough: The prompt is too long.\n"
