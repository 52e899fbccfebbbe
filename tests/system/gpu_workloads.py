"""W1 to W6 of both model shapes on a GPU, as `docs/performance.md` has them: `PYTHONPATH=. python` this file.

`--tokenizers` is a folder with the tokenizers of Qwen3 (`qwen3`) and Llama 3 (`llama3_2`); without it nothing is
served, so there are no W5 and W6. Prints the benchmarks' own lines. Where Triton's cache is empty, the first start is a
cold one; that of the second shape finds kernels that do not depend on the shape.

`--beside '--enable-hierarchical-cache --hicache-size 32'` measures with these flags as well, in turns: offline one
process after the other, online two servers that share the GPU, of which one is asked at a time.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.system.serving import running, until

BENCH = (sys.executable, "-m", "bough.cli.main", "bench")
CONTEXT = ("--context-length", "8192")


@dataclass(frozen=True)
class Shape:
    """A model's shape, its tokenizer, and requests per second: what it can serve, and more than that."""

    name: str
    tokenizer: str
    rate: int
    too_many: int


SHAPES = (Shape("qwen3-0.6b", "qwen3", 64, 160), Shape("llama-3.1-8b", "llama3_2", 40, 80))


def offline(shape: Shape, kinds: Sequence[Sequence[str]]) -> None:
    load = ("--workload", "W3", "W1", "W2", "W4", "--repeat", "2", "--json")
    for flags in kinds:
        if len(kinds) > 1:
            print("with", *flags, flush=True)
        subprocess.run([*BENCH, "offline", *load, *CONTEXT, "--model-shape", shape.name, *flags], check=True)


def online(shape: Shape, tokenizers: Path, kinds: Sequence[Sequence[str]]) -> None:
    began = time.monotonic()
    flags = ("--model-shape", shape.name, "--tokenizer-path", str(tokenizers / shape.tokenizer), *CONTEXT)
    share = ("--max-total-tokens", "300000") if len(kinds) > 1 else ()
    with ExitStack() as servers:
        urls = []
        for more in kinds:
            urls.append(servers.enter_context(running(*flags, *share, *more, "--served-model-name", "m")).url)
            until(lambda: _is_warm(urls[-1]), "all graphs are captured")
        print(f"{shape.name}: all graphs were captured {time.monotonic() - began:.1f} s after the start", flush=True)
        loads: list[tuple[object, ...]] = [
            ("W5", "--rate", shape.too_many),
            ("W5", "--rate", shape.rate),
            ("W5", "--rate", shape.too_many),
            ("W6",),
            ("W6",),
        ]
        for seed, load in enumerate(loads, 1):  # the first one warms up
            for url, more in zip(urls, kinds, strict=True):
                words = ("--url", url, "--model", "m", "--procs", 6, "--seed", seed, "--work", *load)
                print(*load, "with", *more, flush=True)
                subprocess.run([*BENCH, "online", *map(str, words)], check=True)


def _is_warm(url: str) -> bool:
    info = httpx.get(f"{url}/get_server_info", timeout=30).json()
    states = info["internal_states"]  # there is none while the engine is too busy to answer
    return bool(states) and not states[0]["warming_up"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="W1 to W6 of both model shapes")
    parser.add_argument("--tokenizers", type=Path, help="folder with the tokenizers qwen3 and llama3_2")
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names)
    parser.add_argument("--beside", metavar="FLAGS", help="measures with these flags of a server as well, in turns")
    asked = parser.parse_args(arguments)
    kinds: list[list[str]] = [[]] if asked.beside is None else [[], shlex.split(asked.beside)]
    for shape in SHAPES:
        if shape.name in asked.shapes:
            print(shape.name, flush=True)
            offline(shape, kinds)
            if asked.tokenizers is not None:
                online(shape, asked.tokenizers, kinds)


if __name__ == "__main__":
    main()
