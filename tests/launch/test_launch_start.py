"""What a start does not wait for: modules that a process does not need, and the garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

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


def test_an_executor_needs_neither_a_compiler_of_graphs_nor_a_converter_of_files(tiny_model: Path) -> None:
    code = (
        "import sys\n"
        "from bough.executor.native_tapes import why_not_recorded\n"
        "from bough.loader.config import read_config\n"
        "from bough.loader.locate import locate\n"
        "import bough.loader.gguf_file\n"
        f"assert why_not_recorded(read_config(locate({str(tiny_model)!r}))) is None\n"
        "print(sorted({'torch._dynamo', 'sympy', 'mistral_common'} & set(sys.modules)))"
    )
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
