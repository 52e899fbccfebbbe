"""What a start does not wait for: modules that a process does not need, and the garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from bough.core.child_environment import settle_garbage


@pytest.mark.parametrize(
    ("modules", "not_needed"),
    [
        ("bough.launch.child, bough.launch.scheduler_process", "asyncio bough.client bough.constrained tokenizers"),
        ("bough.launch.child, bough.launch.detokenizer_process", "asyncio bough.client bough.constrained"),
        ("bough.launch.engine", "numpy tokenizers bough.client bough.scheduler"),  # before the processes are started
    ],
)
def test_a_process_begins_with_what_it_needs(modules: str, not_needed: str) -> None:
    code = f"import sys, {modules}; print(sorted(set({not_needed.split()}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_garbage_is_collected_again_when_a_process_is_ready() -> None:
    try:
        gc.disable()
        settle_garbage()
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()
