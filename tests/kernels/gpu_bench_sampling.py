"""Times a sampling step on a CUDA device beside plain torch; a script, run by hand.

The kernels' times are of a captured CUDA graph, which is how a decode step samples; torch's are of plain launches,
because `multinomial` reads the device and cannot be captured. `--sweep` also tries other sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from torch import Tensor

from bough.kernels.sampling.rows import RowParameters
from bough.kernels.sampling.triton import SamplingConfig, config_for, sample_rows
from tests.kernels.references import sampling as reference

BATCHES = (1, 16, 256, 512)
VOCABULARIES = (151_936, 128_256)
KINDS = ("greedy", "temperature", "top-k+top-p", "top-p")


def make_parameters(kind: str, n: int, vocab_size: int) -> RowParameters:
    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((n,), value, dtype=dtype, device="cuda")

    return RowParameters(
        random=column(kind != "greedy", torch.bool),
        temperature=column(0.6, torch.float32),
        top_k=column(50 if kind == "top-k+top-p" else vocab_size, torch.int64),
        top_p=column(0.95 if "top-p" in kind else 1.0, torch.float64),
        min_p=column(0.0, torch.float32),
        seed=torch.arange(n, device="cuda"),
        generated=column(0, torch.int64),
    )


def torch_baseline(kind: str, logits: Tensor) -> Tensor:
    if kind == "greedy":
        return logits.argmax(dim=-1)
    probs = torch.softmax(logits.float() / 0.6, dim=-1)
    if "top-p" not in kind:
        return torch.multinomial(probs, 1)
    ranked, order = probs.sort(dim=-1, descending=True)
    ranked = ranked.masked_fill(ranked.cumsum(dim=-1) - ranked > 0.95, 0.0)
    if kind == "top-k+top-p":
        ranked[:, 50:] = 0.0
    return order.gather(1, torch.multinomial(ranked, 1))


def captured_microseconds(call: Callable[[], object]) -> float:
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(triton.testing.do_bench_cudagraph(call, rep=20)) * 1e3


def launched_microseconds(call: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(call, warmup=5, rep=20, return_mode="median")) * 1e3


def peaked(n: int, vocab_size: int) -> Tensor:
    """Logits shaped like a language model's: a wide floor, and a few tokens well above it."""
    logits = torch.randn(n, vocab_size, device="cuda") * 2.0
    best = torch.randint(vocab_size, (n, 40), device="cuda")
    return logits.scatter_add_(1, best, torch.rand(n, 40, device="cuda") * 16.0).bfloat16()


def agreement(kind: str, logits: Tensor) -> float:
    """The share of rows in which the kernels and the reference draw the same token."""
    rows = torch.arange(len(logits), device="cuda")
    results = [
        sample(logits, rows, make_parameters(kind, *logits.shape), "top" in kind)[0]
        for sample in (sample_rows, reference.sample_rows)
    ]
    return float((results[0] == results[1]).double().mean())


def variants(n: int, vocab_size: int, sweep: bool) -> dict[str, SamplingConfig]:
    base = config_for(n, vocab_size)
    if not sweep:
        return {"default": base}
    found = {"default": base}
    for programs in (1, 4, 8, 16, 38, 75):
        found[f"programs {programs}"] = replace(base, scan_programs=programs, gather_programs=min(programs, 38))
    for warps in (4, 16):
        found[f"pick warps {warps}"] = replace(base, pick_warps=warps)
    found["segment 128, block 2048"] = replace(base, segment=128, block=2048)
    found["scan 8 tiles"] = replace(base, scan_tiles=8)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    sweep = parser.parse_args().sweep
    print(f"{'V':>7} {'n':>4} {'kind':<12} {'torch µs':>9} {'µs':>8}  agree  best variant")
    for vocab_size in VOCABULARIES:
        for n in BATCHES:
            logits, rows = peaked(n, vocab_size), torch.arange(n, device="cuda")
            for kind in KINDS:
                parameters = make_parameters(kind, n, vocab_size)
                times = {}
                for name, config in variants(n, vocab_size, sweep).items():

                    def step(config: SamplingConfig = config, parameters: RowParameters = parameters) -> object:
                        return sample_rows(logits, rows, parameters, "top" in kind, config=config)  # noqa: B023

                    times[name] = captured_microseconds(step)
                baseline = launched_microseconds(lambda: torch_baseline(kind, logits))  # noqa: B023
                best = min(times, key=lambda name: times[name])
                share = agreement(kind, logits[:16])
                line = f"{vocab_size:>7} {n:>4} {kind:<12} {baseline:>9.1f} {times['default']:>8.1f}  {share:>5.3f}"
                print(f"{line}  {best} {times[best]:.1f}", flush=True)


if __name__ == "__main__":
    main()
