"""`bough bench cpu` from end to end: on a tiny model, and beside a stand-in for llama_cpp that does no arithmetic."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bough.cli.bench import run_benchmark
from bough.cli.main import main
from bough.core.errors import SettingsError
from tests.bench import cpu_executor, cpu_llama, cpu_profile
from tests.bench.cpu import compare, llama_side
from tests.bench.cpu_cases import cases
from tests.bench.cpu_llama import Peer, PeerError, build_peer, find_peer, peer_folder

TINY = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-total-tokens", "4096", "--cpu-threads", "1"]

# Checks what it is told (positions follow one another in every sequence) and finds the token after the last one best.
STAND_IN = """
import ctypes
__version__ = "0.0.1"
i32 = ctypes.POINTER(ctypes.c_int32)
class llama_batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32), ("token", i32), ("embd", ctypes.c_void_p), ("pos", i32),
                ("n_seq_id", i32), ("seq_id", ctypes.POINTER(i32)), ("logits", ctypes.POINTER(ctypes.c_int8))]
class Params: pass
lengths, last = {}, {}
llama_log_callback = lambda call: call
def nothing(*args): return 1
llama_log_set = llama_backend_init = llama_model_load_from_file = llama_model_get_vocab = llama_get_memory = nothing
llama_model_default_params = llama_context_default_params = Params
llama_free = nothing
llama_vocab_n_tokens = lambda vocab: 10_001
def llama_init_from_model(model, params): return params
def llama_memory_clear(memory, data): lengths.clear()
def llama_memory_seq_cp(memory, source, target, first, end): lengths[target] = lengths[source]
def llama_decode(context, batch):
    for i in range(batch.n_tokens):
        sequence = batch.seq_id[i][0]
        assert sequence < context.n_seq_max and batch.pos[i] == lengths.get(sequence, 0)
        lengths[sequence] = batch.pos[i] + 1
        last[i] = batch.token[i]
    return 0
def llama_get_logits_ith(context, place):
    logits = (ctypes.c_float * 10_001)()
    logits[last[place] + 1] = 1.0
    return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "path" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.0.1"\n')
    (package / "llama_cpp.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


def test_llama_runs_every_load(stand_in: None) -> None:
    peer = find_peer(None)
    assert peer == Peer(Path(sys.executable), "0.0.1")
    found = compare([llama_side(peer)], cases(scale=0.02), 2, 2, "a.gguf", 1, {})
    assert [case.name for case in found.cases] == [case.name for case in cases()]
    assert all(rate > 0 for case in found.cases for rate in case.rates_of("llama.cpp"))
    (start,) = found.starts
    assert [name for name, _ in start.median.parts] == ["imports", "load", "first token"] and len(start.starts) == 2
    assert start.peak_bytes > 1_000_000 and start.median.cpu_s > 0


def tiny_load(model: Path, folder: Path) -> list[str]:
    load = ["--scale", "0.1", "--rounds", "1", "--starts", "1", "--vocab", "100", "--output", str(folder / "found")]
    return [*load, "--model", str(model), *TINY]


def found_in(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "found.json").read_text())
    assert all(side["rates"][0] > 0 for case in found["cases"] for side in case["sides"])
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_the_engine_runs_loads(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu", "--case", "decode", "chats-32", *tiny_load(tiny_model, tmp_path)]) == 0
    found = found_in(tmp_path)
    assert [start["side"] for start in found["starts"]] == ["engine"]
    parts = dict(found["starts"][0]["starts"][0]["parts"])
    assert list(parts) == ["imports", "processes and their imports", "load", "first token"]
    assert all(seconds > 0 for seconds in parts.values())
    assert "32 chats × 32 tokens over 1,000" in capsys.readouterr().out


@pytest.mark.slow
def test_engine_and_executor_run_every_load(tiny_model: Path, tmp_path: Path) -> None:
    assert run_benchmark("cpu_executor", cpu_executor, tiny_load(tiny_model, tmp_path)) == 0
    found = found_in(tmp_path)
    assert [start["side"] for start in found["starts"]] == ["engine", "executor"]
    assert [case["name"] for case in found["cases"]] == [case.name for case in cases()]


def test_a_profile_needs_no_tokenizer(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--vocab", "100", "--model", str(tiny_model), *TINY]
    assert run_benchmark("cpu_profile", cpu_profile, flags) == 0
    shown = capsys.readouterr().out
    assert "a decode step of 16 streams" in shown and "executor's thread" in shown and "JSON" not in shown


@pytest.mark.slow
def test_a_profile_under_a_schema_shows_what_masks_cost(capsys: pytest.CaptureFixture[str]) -> None:
    """On the default model: a schema needs a vocabulary of words."""
    assert run_benchmark("cpu_profile", cpu_profile, ["--scale", "0.5", "--cpu-threads", "1"]) == 0
    free, bound = capsys.readouterr().out.split("the same under a JSON schema")
    assert "filling masks" in bound and "filling masks" not in free


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--rounds", "0"], "--rounds must be at least 1, got 0."),
        (["--scale", "2"], "--scale must be above 0 and at most 1, got 2.0."),
        (["--against", "llama-cpp"], "--against llama-cpp needs a model that llama.cpp reads: a GGUF file."),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: list[str], text: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cpu", *flags, "--model", str(tiny_model), *TINY]) == 2
    assert capsys.readouterr().err == f"bough: {text}\n"


def test_cpu_time_is_counted_for_one_thread_only(tiny_model: Path) -> None:
    flags = ["--model", str(tiny_model), *TINY, "--cpu-time", "--cpu-threads", "2"]
    with pytest.raises(SettingsError, match=r"^--cpu-time is for one thread: add --cpu-threads 1\.$"):
        run_benchmark("cpu_executor", cpu_executor, flags)


def test_a_python_without_the_package_is_no_peer(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="cannot import llama_cpp"):
        find_peer(str(tmp_path / "no-python"))


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path))
    commands: list[list[str]] = []

    def run(command: list[str], environment: dict[str, str]) -> None:
        commands.append(command)
        (peer_folder() / "bin").mkdir(parents=True, exist_ok=True)
        if "--no-binary" in command:
            assert "-DGGML_NATIVE=ON" in environment["CMAKE_ARGS"]
            raise PeerError("no compiler")

    monkeypatch.setattr(cpu_llama, "_run", run)
    with pytest.raises(PeerError, match="no compiler"):
        build_peer()
    assert len(commands) == 3 and all(str(tmp_path) in " ".join(command) for command in commands)
    assert not peer_folder().exists()
