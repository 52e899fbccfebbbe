"""The engine's benchmarks on a tiny model: their loads are what they say, and their figures add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bough.bench.offline import shared_prefix_jobs, workload
from bough.cli.main import main

TINY = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-total-tokens", "4096", "--cpu-threads", "1"]


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, float]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_workloads_are_seeded_and_shaped() -> None:
    assert workload("W2") == workload("W2")
    assert len(workload("W1")) == 256 and len(workload("W4")[0].prompt) == 4096
    jobs = workload("W2")
    assert len({tuple(job.prompt[:1024]) for job in jobs}) == 8
    few = shared_prefix_jobs(2, 3, 10, 4, 1)
    assert len(few) == 6 and len({tuple(job.prompt[:10]) for job in few}) == 2


@pytest.mark.slow
def test_offline_compares_with_and_without_the_cache(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--workload", "shared-prefix", "--groups", "2", "--per-group", "4", "--prefix-len", "32"]
    load += ["--input-len", "4", "--output-len", "3", "--vocab", "100", "--compare-no-cache", "--json"]
    assert main(["bench", "offline", *load, "--model", str(tiny_model), *TINY]) == 0
    cached, plain = lines_of(capsys)
    assert cached["cached_tokens"] == 2 * 3 * 32 and plain["cached_tokens"] == 0
    assert cached["output_tokens"] == plain["output_tokens"] == 8 * 3
    assert cached["successful_requests"] == 8 and cached["speed_up"] > 0


def test_one_batch_measures_each_size(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--batch-size", "1", "3", "--input-len", "8", "--output-len", "4", "--json"]
    assert main(["bench", "one-batch", *load, "--model", str(tiny_model), *TINY]) == 0
    assert [line["batch_size"] for line in lines_of(capsys)] == [1, 3]


@pytest.mark.slow
def test_offline_runs_one_rank_of_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    shape = ["--model-shape", "qwen3-0.6b", "--simulate-tp", "8", "--json-model-override-args", json.dumps(small)]
    load = ["--num-prompts", "3", "--input-len", "8", "--output-len", "4", "--vocab", "100", "--json"]
    assert main(["bench", "offline", *load, *shape, "--device", "cpu", "--max-total-tokens", "256"]) == 0
    assert lines_of(capsys)[0]["output_tokens"] == 3 * 4


@pytest.mark.parametrize("flag", ["--num-prompts", "--input-len", "--output-len", "--repeat"])
def test_a_load_of_nothing_is_refused(flag: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", flag, "0", "--model", str(tiny_model), *TINY]) == 2
    assert capsys.readouterr().err == f"bough: {flag} must be at least 1, got 0.\n"


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize("flag", ["--batch-size", "--input-len", "--output-len"])
def test_a_batch_of_nothing_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "one-batch", flag, value]) == 2
    assert capsys.readouterr().err == f"bough: {flag} must be at least 1, got {value}.\n"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            "--batch-size 1 --input-len 60 --output-len 8 --context-length 64",
            "--input-len 60 and --output-len 8 are 68 tokens, the context is 64 tokens.",
        ),
        (
            "--batch-size 1 5 --input-len 8 --max-running-requests 4",
            "--batch-size 5 is more than the 4 requests that run at once;",
        ),
        (
            "--batch-size 64 --input-len 80 --output-len 8",
            "--batch-size 64 needs 5632 tokens of KV cache, there are 4096;",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_before_any_is_measured(
    flags: str, complaint: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "one-batch", *flags.split(), "--model", str(tiny_model), *TINY]) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and seen.err.splitlines()[-1].startswith(f"bough: {complaint}")


@pytest.mark.slow
def test_a_load_that_was_not_served_has_no_figures(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--num-prompts", "2", "--input-len", "600", "--vocab", "100"]
    assert main(["bench", "offline", *load, "--model", str(tiny_model), *TINY]) == 1
    seen = capsys.readouterr()
    assert seen.out == "" and "2 of 2 requests failed, the first with: The prompt of 600 tokens" in seen.err
