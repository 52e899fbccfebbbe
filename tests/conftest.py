"""Shared by all tests: small models, profiles for the property tests, and Triton without a GPU."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True)  # the same examples each time: no flaky suite
settings.load_profile("suite")

# Without a GPU, Triton's kernels run in its interpreter. It reads the variable when a kernel is defined, so it is set
# before any test module is imported.
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    import tests.fakes.triton_interpreter  # noqa: F401


# Kernels in Triton's interpreter take a thousand times as long as on a GPU. Of each of their parametrised tests the
# first and the last case are quick; the sweep between them is slow.
SWEPT = ("tests/kernels/", "tests/attention/", "tests/executor/test_executor_cuda_simulated.py")


# Files with few and long tests go first: at the end of a run, no process works on one while the others are done.
LONG_FILES = ("tests/system/", "tests/parity/", *SWEPT)


LONG_TIMEOUT_S = 3600


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and items are a million objects that stay: a collection of garbage that looked at them took half a
    second, and some tests ask for many."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG_FILES) if item.nodeid.startswith(name)), 99))
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
    if HAS_GPU:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="there is no GPU here"))
        elif item.nodeid.startswith(SWEPT) and not any(map(item.get_closest_marker, ("slow", "long"))):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for swept in cases.values():
        for item in swept[1:-1]:
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What is missing here, with the number of tests that it keeps from running: one line each, where `-rs` has one for
    each place."""
    skipped = (report.longrepr for report in terminalreporter.stats.get("skipped", ()))
    reasons = Counter(found[2].removeprefix("Skipped: ") for found in skipped if isinstance(found, tuple))
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests run on all cores already, and threads that wait for another one's core are busy meanwhile. For each test
    anew, because an executor that is built here sets the threads that its engine would have."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """An engine that an earlier test has started in this process may have kept our logs to itself, above some level."""
    monkeypatch.setattr(logging.getLogger("bough"), "propagate", True)
    caplog.set_level(logging.NOTSET, logger="bough")
    return caplog


TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 0,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a configuration: served with random weights and without a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder
