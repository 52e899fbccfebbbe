"""Types that several threads read are known to msgspec before there are threads: two that began at once would crash."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys

import msgspec
import msgspec._utils
from {module} import {name}

def resolve(*given):
    raise SystemExit("the type is looked into when it is first read")

msgspec._utils._eval_type = resolve
try:
    msgspec.convert({{}}, {name})
except msgspec.ValidationError:
    pass
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("bough.core.sampling_params", "SamplingParams"),
        ("bough.constrained.compiler", "Prepared"),
        ("bough.constrained.compiler_process", "Outcome"),
        ("bough.multimodal.preparer", "Prepared"),
    ],
)
def test_a_type_that_threads_read_is_known_when_its_module_is(module: str, name: str) -> None:
    script = SCRIPT.format(module=module, name=name)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
