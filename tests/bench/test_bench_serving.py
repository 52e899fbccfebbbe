"""`bough bench serving` against a real HTTP server whose engine plays a script."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bough.cli.main import main
from bough.core.finish import FinishAbort
from tests.bench.bench_server import BenchServer, bench_server

SMALL = ["--num-prompts", "6", "--random-input-len", "5", "--random-output-len", "4", "--disable-tqdm"]


@pytest.fixture(scope="module")
def server() -> Iterator[BenchServer]:
    with bench_server() as started:
        yield started


@pytest.fixture(autouse=True)
def forget(server: BenchServer) -> None:
    server.engine.sent.clear()
    server.engine.commands.clear()


def run(server: BenchServer, tmp_path: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    file = tmp_path / "runs.jsonl"
    words = ["bench", "serving", "--base-url", server.url, *SMALL, "--output-file", str(file), *flags]
    assert main(words) == code
    line: dict[str, Any] = json.loads(file.read_text().splitlines()[-1])
    return line


@pytest.mark.parametrize("backend", ["bough", "sglang", "vllm", "openai-chat", "llama.cpp"])
@pytest.mark.parametrize("stream", [True, False])
def test_every_kind_of_server_is_asked_and_counted(
    server: BenchServer, tmp_path: Path, backend: str, stream: bool
) -> None:
    result = run(server, tmp_path, "--backend", backend, *([] if stream else ["--disable-stream"]))
    assert result["completed"] == 6 and result["failed"] == 0
    assert result["total_output_tokens"] == 6 * 4
    prompts = server.prompts[1:]  # the first was the warm-up
    assert result["total_input_tokens"] == sum(len(r.input_ids) // 4 for r in server.engine.requests[1:])
    assert len(set(prompts)) == 6
    assert all(request.stream is stream and request.sampling.ignore_eos for request in server.engine.requests)


def test_what_is_printed_is_what_sglangs_tool_prints(
    server: BenchServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(server, tmp_path, "--request-rate", "200")
    shown = capsys.readouterr().out
    for line in (
        "Successful requests:",
        "Request throughput (req/s):",
        "Total token throughput (tok/s):",
        "Concurrency:",
    ):
        assert line in shown
    for spread in ("E2E Latency", "TTFT", "TPOT", "ITL"):
        assert all(f"{word} {spread} (ms):" in shown for word in ("Mean", "Median", "P99"))


def test_the_accepted_length_is_that_of_a_server_that_drafts(
    server: BenchServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, tmp_path)["accept_length"] is None and "Accept length" not in capsys.readouterr().out
    server.engine.state["avg_spec_accept_length"] = 2.5
    try:
        assert run(server, tmp_path)["accept_length"] == 2.5
    finally:
        del server.engine.state["avg_spec_accept_length"]
    assert re.search(r"Accept length: +2\.50\n", capsys.readouterr().out)


def test_a_limit_holds_however_many_processes_ask(server: BenchServer, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    words = ["bench", "serving", "--base-url", server.url, *SMALL, "--num-prompts", "10", "--output-file", str(file)]
    words += ["--max-concurrency", "2", "--procs", "2"]
    # A process of its own: this one has threads, and client processes are forked.
    subprocess.run([sys.executable, "-m", "bough.cli.main", *words], check=True, capture_output=True)
    result = json.loads(file.read_text())
    assert result["completed"] == 10 and result["max_concurrent_requests"] <= 2


def test_turns_stand_behind_the_whole_conversation(server: BenchServer, tmp_path: Path) -> None:
    shape = ["--dataset-name", "multi-turn", "--num-turns", "3", "--num-prompts", "1", "--gsp-system-prompt-len", "3"]
    result = run(server, tmp_path, "--backend", "openai", "--warmup-requests", "0", *shape)
    first, second, third = server.prompts
    assert result["completed"] == 3
    assert second.startswith(first + "xxxx\n\n") and third.startswith(second + "xxxx\n\n")
    server.engine.sent.clear()
    run(server, tmp_path, "--backend", "openai-chat", "--warmup-requests", "0", *shape)
    assert server.prompts[2].count("<|im_start|>assistant\nxxxx<|im_end|>") == 2


def test_the_cache_is_flushed_when_asked(server: BenchServer, tmp_path: Path) -> None:
    run(server, tmp_path, "--flush-cache")
    assert [type(command).__name__ for command in server.engine.commands] == ["FlushCache", "GetState"]


def test_extra_fields_reach_every_request(server: BenchServer, tmp_path: Path) -> None:
    run(server, tmp_path, "--extra-request-body", '{"sampling_params": {"top_p": 0.5}, "priority": 3}')
    run(server, tmp_path, "--extra-request-body", '{"top_p": 0.5, "priority": 3}', "--backend", "openai")
    assert {(r.sampling.top_p, r.priority) for r in server.engine.requests} == {(0.5, 3)}


def test_details_and_reports_are_written(server: BenchServer, tmp_path: Path) -> None:
    page, picture = tmp_path / "run.html", tmp_path / "run.png"
    result = run(server, tmp_path, "--output-details", "--tag", "mine", "--html", str(page), "--plot", str(picture))
    assert result["tag"] == "mine" and result["generated_texts"] == ["xxxx"] * 6 and len(result["ttfts"]) == 6
    assert "6 requests" in page.read_text() and picture.read_bytes().startswith(b"\x89PNG")


def test_a_key_is_sent_and_never_written(tmp_path: Path) -> None:
    with bench_server(api_key="secret") as guarded:
        result = run(guarded, tmp_path, "--api-key", "secret")
        assert result["completed"] == 6
        assert "secret" not in (tmp_path / "runs.jsonl").read_text()


def test_failures_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bench_server(lambda request: FinishAbort("too much", 429, "Busy")) as refusing:
        result = run(refusing, tmp_path, "--warmup-requests", "0", code=1)
    assert result["failed"] == 6 and "too much" in result["first_error"]
    assert "Every request failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0."),
        (["--request-rate", "0"], "--request-rate must be above 0, got 0."),
        (["--max-concurrency", "1", "--procs", "2"], "--procs 2 is more than --max-concurrency 1 allows."),
        (["--extra-request-body", "[1]"], "--extra-request-body must be a JSON object."),
        (["--dataset-name", "custom"], "The data set custom is a file: give it with --dataset-path."),
        (["--html", "/no/such/folder/x"], "--html: there is no folder /no/such/folder."),
        (["--backend", "vllm-chat", "--dataset-name", "random-ids"], "Chats take text, not token ids"),
        (["--base-url", "127.0.0.1:1"], "is not the address of a server"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    flags: list[str], complaint: str, server: BenchServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serving", "--base-url", server.url, *SMALL, *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1


def test_a_server_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serving", "--base-url", "http://127.0.0.1:9", *SMALL]) == 1
    assert "Cannot reach http://127.0.0.1:9" in capsys.readouterr().err
