"""SGLang's own benchmark, `sglang.bench_serving`, against a real server with the default model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bough.core.settings import ModelSettings
from bough.launch.parts import open_tokenizer
from bough.loader.locate import locate
from tests.system.foreign import require, what_it_saw
from tests.system.serving import Server, running, until

pytestmark = pytest.mark.slow

PROMPTS, INPUT, OUTPUT = 4, 24, 8
RANDOM = (
    *("--dataset-name", "random-ids", "--num-prompts", str(PROMPTS), "--random-range-ratio", "1"),
    *("--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT), "--disable-tqdm"),
)
LOGPROBS = ("--return-logprob", "--top-logprobs-num", "2", "--logprob-start-len", "0")
CHATS = (  # two questions each; a question begins with the text that its group has in common
    *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "2", "--gsp-prompts-per-group", "1"),
    *("--gsp-system-prompt-len", "24", "--gsp-question-len", "8", "--gsp-output-len", str(OUTPUT)),
    *("--gsp-num-turns", "2", "--gsp-send-routing-key"),
)

ONE_GROUP = (*CHATS[:2], *("--gsp-num-groups", "1"), *CHATS[6:12])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    require("sglang")
    require("transformers")
    require("zmq")
    with running("--max-total-tokens", "20000", "--log-requests", "--log-requests-level", "0") as started:
        yield started


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that Transformers reads: it needs torch for the tokenizer inside a GGUF file."""
    folder = tmp_path_factory.mktemp("tokenizer")
    opened = open_tokenizer(locate(None), ModelSettings())
    assert opened is not None
    opened.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def counted(server: Server) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^bough:(\w+_total)\{.*\} (\S+)$", text, re.MULTILINE)}


def answers(server: Server) -> list[tuple[str, str]]:
    """The paths that were asked for, with the status of each answer."""
    return re.findall(r" [A-Z]+ (/\S*) (\w+) in ", server.log())


@pytest.mark.parametrize(
    ("path", "flags"),
    [
        ("/generate", ("--backend", "sglang", "--tokenize-prompt", "--flush-cache")),
        pytest.param("/generate", ("--backend", "sglang", "--disable-stream", *LOGPROBS), marks=pytest.mark.long),
        pytest.param("/v1/completions", ("--backend", "sglang-oai"), marks=pytest.mark.long),
        ("/v1/completions", ("--backend", "vllm", *LOGPROBS, "--max-concurrency", "2", "--request-rate", "50")),
        ("/v1/chat/completions", ("--backend", "vllm-chat", "--disable-stream")),
        ("/v1/chat/completions", ("--backend", "sglang-oai-chat", *CHATS)),
    ],
)
def test_every_request_of_the_benchmark_is_answered(
    server: Server, tokenizer: Path, path: str, flags: tuple[str, ...]
) -> None:
    before, seen_before = counted(server), len(answers(server))
    seen = what_it_saw("sglang_bench", server.url, "--tokenizer", str(tokenizer), *RANDOM, *flags)
    warm_up = 2 if CHATS[1] in flags else 1  # a conversation of two requests
    asked = PROMPTS + warm_up

    def asked_for() -> list[str]:
        return [path for path, _ in answers(server)[seen_before:]]

    until(lambda: asked_for().count(path) >= asked, "the last answer in the log")
    after, statuses = counted(server), answers(server)[seen_before:]

    assert seen["completed"] == PROMPTS and seen["errors"] == [""] * PROMPTS and all(seen["generated_texts"])
    assert seen["output_lens"] == [OUTPUT] * PROMPTS and seen["total_output_tokens"] == OUTPUT * PROMPTS
    assert all(seen[name] > 0 for name in ("mean_ttft_ms", "mean_e2e_latency_ms", "output_throughput"))
    assert seen["server_info"]["context_length"] == 8192
    streamed = "--disable-stream" not in flags
    assert all(streamed == bool(gaps) for gaps in seen["itls"])

    assert {status for _, status in statuses} == {"200"}
    assert asked_for().count(path) == asked
    assert after["num_requests_total"] - before["num_requests_total"] == asked
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == asked * OUTPUT
    if "--tokenize-prompt" in flags:
        assert seen["total_input_tokens"] == PROMPTS * INPUT
        assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == asked * INPUT


def test_a_batch_is_measured_at_a_running_server(server: Server, tokenizer: Path) -> None:
    """`bench_one_batch_server` asks the server for its limits, and refuses one that does not say them."""
    seen = what_it_saw("sglang_one_batch", server.url, str(tokenizer), "--batch-size", "2", "--skip-warmup", *ONE_GROUP)
    assert (seen["batch_size"], seen["output_len"]) == (2, OUTPUT)
    assert seen["latency"] > seen["last_ttft"] > 0 and seen["output_throughput"] > 0


def test_the_benchmark_records_a_profile(server: Server, tokenizer: Path, tmp_path: Path) -> None:
    seen_before = len(answers(server))
    flags = ("--profile", "--profile-start-step", "1", "--profile-steps", "3", "--profile-output-dir", str(tmp_path))
    seen = what_it_saw("sglang_bench", server.url, "--tokenizer", str(tokenizer), *RANDOM, *flags)
    assert seen["completed"] == PROMPTS and {status for _, status in answers(server)[seen_before:]} == {"200"}
    assert [path.stat().st_size > 100 for path in tmp_path.rglob("*.trace.json.gz")] == [True]
