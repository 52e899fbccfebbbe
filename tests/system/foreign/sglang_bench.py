"""SGLang's `bench_serving` against a server, as `python -m sglang.bench_serving` runs it; prints its line of results.

Takes the address, then more flags of the benchmark. What it imports for other purposes is left out, because it has the
size of an engine: `sglang.srt.utils` is entered without its `__init__`, which imports torch, for one small module
inside; `datasets` is for a data set that has to be downloaded.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # else it asks the network for a tokenizer under the served model's name

import sglang


def put(name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


def main() -> None:
    url, *flags = sys.argv[1:]
    put("sglang.srt.utils", __path__=[str(Path(sglang.__path__[0], "srt", "utils"))])
    put("datasets", load_dataset=None)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        sys.argv = ["bench_serving", "--base-url", url, "--output-file", str(results), "--output-details", *flags]
        runpy.run_module("sglang.bench_serving", run_name="__main__")
        (line,) = results.read_text().splitlines()
    print(line)


main()
