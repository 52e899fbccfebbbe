"""SGLang's `bench_one_batch_server` against a running server; prints its line of results.

Takes the address, a folder with the tokenizer, then more flags of the benchmark. As for `bench_serving`, what it
imports for other purposes is left out: the engine that it could start, and reports of its continuous tests.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import sglang


class NoServerArgs:
    """Of the server that is not started."""

    add_cli_args = staticmethod(lambda parser: ArgumentParser.add_argument(parser, "--model"))
    from_cli_args = classmethod(lambda cls, args: cls())


def put(name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


def main() -> None:
    url, tokenizer, *flags = sys.argv[1:]
    where = Path(sglang.__path__[0])
    put("sglang.srt.utils", __path__=[str(where / "srt" / "utils")], is_blackwell=None, kill_process_tree=None)
    put("sglang.srt.entrypoints", __path__=[])
    put("sglang.srt.entrypoints.http_server", launch_server=None)
    put("sglang.srt.server_args", ServerArgs=NoServerArgs)
    put("sglang.test", __path__=[str(where / "test")])
    put("sglang.test.test_utils", is_in_ci=lambda: False, write_github_step_summary=None)
    put("sglang.test.nightly_bench_utils", save_results_as_pydantic_models=None)
    put("datasets", load_dataset=None)
    put("tabulate", tabulate=None)
    import sglang.test.bench_one_batch_server_internal as tool

    opened = tool.get_tokenizer(tokenizer)
    tool.get_tokenizer = lambda path: opened  # Transformers reads no GGUF file without torch
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        sys.argv = ["bench_one_batch_server", "--base-url", url, "--result-filename", str(results), *flags]
        runpy.run_path(str(where / "bench_one_batch_server.py"), run_name="__main__")
        (line,) = results.read_text().splitlines()
    print(line)


main()
