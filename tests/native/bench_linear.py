"""How fast the products with quantised weights are on this machine, for the linear layers of small models.

    python -m tests.native.bench_linear [--threads 2] [--model smollm2] [--formats Q4_MIN Q8] [--tokens 1 16 512]

Every layer has weights of its own, so that they come from where they would in a model. For few tokens compare GB/s with
the memory's; for many, GOPS (2 for each multiply and add) with those of torch's own packed products. With one thread
its CPU time is taken, so that a busy machine matters less.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import numpy as np
import torch

from bough.kernels.quant_linear import packed as native
from bough.kernels.quant_linear.packed import Format, PackedWeight, aligned_bytes
from bough.native.tape import ThreadPool

SHAPES = {  # inputs: outputs of one layer; layers
    "smollm2": ({576: 576 + 2 * 192 + 576 + 2 * 1536, 1536: 576}, 30),
    "qwen3-0.6b": ({1024: 2048 + 2 * 1024 + 2 * 3072, 2048: 1024, 3072: 1024}, 28),
    "llama-3.2-1b": ({2048: 2048 + 2 * 512 + 2048 + 2 * 8192, 8192: 2048}, 16),
}
FEATURES = {"plain": 0, "avx2": 1, "avxvnni": 9, "avx512": 3, "neon": 4, "amx": 0xFFFF}  # masks of cpu.h


def random_weight(form: Format, n: int, k: int) -> PackedWeight:
    library = native.linear_library()
    blob = aligned_bytes(library.bough_weight_bytes(form, n, k))
    blob[:] = np.random.default_rng(0).integers(
        32, 60, blob.size, np.uint8
    )  # ordinary numbers as 16-bit or 32-bit floats
    return PackedWeight(form, n, k, blob)


def fastest(call: Callable[[], object], threads: int, budget: float = 0.6) -> float:
    clock = time.thread_time if threads == 1 else time.perf_counter
    call()
    times: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times) < 3:
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def memory_speed(threads: int) -> float:
    torch.set_num_threads(threads)
    block = torch.ones(1 << 27, dtype=torch.int32)  # 512 MB
    return block.nbytes / fastest(lambda: block.sum(dtype=torch.int32), threads) / 1e9


def torch_products(n: int, k: int, m: int, threads: int) -> dict[str, float]:
    """Seconds of the packed products that torch has here."""
    x = torch.randn(m, k, dtype=torch.bfloat16)
    wide = torch.randn(n, k, dtype=torch.bfloat16)
    found = {"bf16": fastest(lambda: torch.nn.functional.linear(x, wide), threads, 0.3)}
    int8, scales = torch.randint(-127, 127, (n, k), dtype=torch.int8), torch.rand(n, dtype=torch.bfloat16)
    found["int8pack"] = fastest(lambda: torch._weight_int8pack_mm(x, int8, scales), threads, 0.3)
    if hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 15, (n, k), dtype=torch.int32), 1)
        zeros = torch.rand(k // 32, n, 2, dtype=torch.bfloat16)
        found["int4pack"] = fastest(
            lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, zeros), threads, 0.3
        )
    return found


def measure(weights: list[PackedWeight], m: int, pool: ThreadPool, *, prompt: bool) -> tuple[float, int, int]:
    """Seconds, bytes and operations of all weights for m tokens."""
    library = native.linear_library()
    inputs = {weight.k: torch.randn(m, weight.k) for weight in weights}
    outs = {weight.n: torch.empty(m, weight.n) for weight in weights}
    structs = [native.structs_of([weight]) for weight in weights]
    scratch = aligned_bytes(max(library.bough_linear_scratch(one, 1, m, pool.threads) for one in structs))
    calls = [
        (
            pool.handle,
            one,
            1,
            inputs[w.k].data_ptr(),
            w.k,
            outs[w.n].data_ptr(),
            w.n,
            None,
            m,
            prompt,
            scratch.ctypes.data,
        )
        for one, w in zip(structs, weights, strict=True)
    ]

    def run() -> None:
        for call in calls:
            library.bough_linear_alone(*call)

    bytes_read = sum(weight.blob.size for weight in weights)
    return fastest(run, pool.threads), bytes_read, sum(2 * m * weight.n * weight.k for weight in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", choices=SHAPES, default="smollm2")
    parser.add_argument("--formats", nargs="+", default=[form.name for form in Format])
    parser.add_argument("--variants", nargs="+", default=list(FEATURES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 32, 512])
    parser.add_argument("--torch", action="store_true", help="also torch's packed products")
    options = parser.parse_args()
    print(f"memory: {memory_speed(options.threads):.1f} GB/s read by torch, {options.threads} threads")
    library = native.linear_library()
    pool = ThreadPool(library, options.threads)
    library.bough_cpu_allow.argtypes = [ctypes.c_uint]
    outputs, layers = SHAPES[options.model]
    for form in (Format[name] for name in options.formats):
        weights = [random_weight(form, n, k) for _ in range(layers) for k, n in outputs.items()]
        for name in options.variants:
            library.bough_cpu_allow(FEATURES[name])
            for m in options.tokens:
                if native.variant(form, prompt=name == "amx") != name:
                    continue
                seconds, size, operations = measure(weights, m, pool, prompt=name == "amx")
                print(
                    f"{form.name:8} {name:8} m={m:<5} {seconds * 1e3:9.2f} ms {size / seconds / 1e9:7.1f} GB/s "
                    f"{operations / seconds / 1e9:8.0f} GOPS {m / seconds:9.0f} tok/s",
                    flush=True,
                )
    if options.torch:
        for m in options.tokens:
            for k, n in outputs.items():
                for name, seconds in torch_products(n, k, m, options.threads).items():
                    speed = 2 * m * n * k / seconds / 1e9
                    print(f"torch {name:9} k={k} m={m:<5} {seconds * 1e3:9.2f} ms {speed:8.0f} GOPS", flush=True)


if __name__ == "__main__":
    main()
