"""How many tokens the KV cache holds: pure arithmetic over what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from bough.core.errors import ResourceError
from bough.core.settings import MemorySettings

CPU_POOL_SHARE = 0.25  # of the free memory: several engines live side by side on one machine
CPU_POOL_CONTEXTS = 32
GPU_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class CacheSize:
    """In pages, with the reason for the start log."""

    pages: int
    note: str


def size_cpu_cache(
    settings: MemorySettings, *, free_bytes: int, weight_bytes: int, bytes_per_token: int, context_length: int
) -> CacheSize:
    """The smaller of a share of the free memory and what 32 full contexts need, unless the user says otherwise.

    `free_bytes` is what is free once the weights are loaded.
    """
    size = settings.page_size
    if settings.max_total_tokens is not None:
        tokens, why = settings.max_total_tokens, "--max-total-tokens"
        needed = tokens * bytes_per_token
        if needed > free_bytes:
            raise ResourceError(
                f"--max-total-tokens {tokens} needs {_gib(needed)} for the KV cache, but only {_gib(free_bytes)} are "
                f"free; set it to {free_bytes // bytes_per_token // size * size} or less."
            )
    elif settings.mem_fraction_static is not None:
        budget = int((free_bytes + weight_bytes) * settings.mem_fraction_static) - weight_bytes
        if budget < bytes_per_token * size:
            raise ResourceError(
                f"--mem-fraction-static {settings.mem_fraction_static} leaves nothing for the KV cache: the weights "
                f"take {_gib(weight_bytes)} of {_gib(free_bytes + weight_bytes)}; raise it or set --max-total-tokens."
            )
        tokens, why = budget // bytes_per_token, f"--mem-fraction-static {settings.mem_fraction_static}"
    else:
        by_memory = int(free_bytes * CPU_POOL_SHARE) // bytes_per_token
        by_context = CPU_POOL_CONTEXTS * context_length
        if by_memory < by_context:
            tokens, why = by_memory, f"a quarter of {_gib(free_bytes)} free memory"
        else:
            tokens, why = by_context, f"{CPU_POOL_CONTEXTS} times the context of {context_length}"
    pages = tokens // size
    if pages < 1 or pages * size < 2:
        raise ResourceError(
            f"The KV cache would hold only {tokens} tokens ({_gib(free_bytes)} are free, a token takes "
            f"{bytes_per_token} bytes); free some memory, or set --max-total-tokens or --mem-fraction-static."
        )
    note = f"KV cache: {pages * size} tokens ({_gib(pages * size * bytes_per_token)} when full), from {why}"
    return CacheSize(pages, note)


def size_gpu_cache(
    settings: MemorySettings,
    *,
    free_bytes: int,
    total_bytes: int,
    activation_bytes: int,
    bytes_per_token: int,
    graph_bytes: int = 0,
) -> CacheSize:
    """What `--mem-fraction-static` of the device leaves after the weights; the rest is for the largest step, for graphs
    and for what libraries take by themselves, and never less than what these need. `free_bytes` is what is free once
    the weights are loaded."""
    size = settings.page_size
    fraction = GPU_FRACTION if settings.mem_fraction_static is None else settings.mem_fraction_static
    usable = free_bytes - activation_bytes - graph_bytes
    budget = min(usable, free_bytes - int(total_bytes * (1.0 - fraction)))
    fitting = max(0, budget // bytes_per_token // size * size)
    tokens, why = fitting, f"{fraction:.0%} of {_gib(total_bytes)} less weights"
    if budget == usable:
        why = f"what weights, a step of {_gib(activation_bytes)} and graphs of {_gib(graph_bytes)} leave"
    if settings.max_total_tokens is not None:
        tokens, why = settings.max_total_tokens // size * size, "--max-total-tokens"
        if tokens * bytes_per_token > usable:
            raise ResourceError(
                f"--max-total-tokens {settings.max_total_tokens} needs {_gib(tokens * bytes_per_token)} for the KV "
                f"cache, but only {_gib(usable)} are left on the device; set it to {fitting} or less."
            )
    if tokens < max(size, 2):
        raise ResourceError(
            f"Nothing is left on the device for the KV cache ({_gib(free_bytes)} free, a step needs "
            f"{_gib(activation_bytes)}); raise --mem-fraction-static, or lower --chunked-prefill-size or "
            "--max-running-requests."
        )
    note = f"KV cache: {tokens} tokens ({_gib(tokens * bytes_per_token)}), from {why}"
    return CacheSize(tokens // size, note)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
