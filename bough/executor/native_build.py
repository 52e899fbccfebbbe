"""Decides whether a model runs on the native CPU kernels, and builds the executor that does."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable

import torch

from bough.attention.registry import BackendNames
from bough.core.errors import SettingsError
from bough.core.model_config import ModelConfig
from bough.core.plan import Limits
from bough.core.settings import Settings
from bough.executor.native_executor import NativeExecutor
from bough.executor.native_recorder import CACHE_NUMBERS, Recorder
from bough.executor.native_tapes import NativeTapes, why_not_recorded
from bough.kernels.quant_linear.filling import FOR_FLOATS
from bough.kernels.quant_linear.native import variant
from bough.kernels.quant_linear.packed import Format
from bough.memory.pools.kv_pool import KVPool, cache_dtype
from bough.models.base import CausalLM
from bough.native.library import load_library, why_absent
from bough.sampling.logprobs import INPUT_BLOCK

log = logging.getLogger(__name__)

MAX_HEAD_DIM = 256  # BOUGH_MAX_HEAD_DIM of src/ops.h


def native_library(
    settings: Settings, names: BackendNames, config: ModelConfig, dtype: torch.dtype
) -> ctypes.CDLL | None:
    """The compiled kernels, if this engine is to use them; else one line says why not, unless that was asked for."""
    unwanted = (names.prefill, names.decode) != ("native", "native")
    why = "torch attention is asked for (--attention-backend)" if unwanted else _obstacle(settings, config, dtype)
    library = load_library() if why is None else None
    if library is not None:
        return library
    why = why or why_absent()
    quantization = settings.model.quantization
    if quantization in FOR_FLOATS:
        raise SettingsError(f"--quantization {quantization} is done by the native CPU kernels, but {why}.")
    if settings.model.enable_deterministic_inference:
        raise SettingsError(f"--enable-deterministic-inference needs the native kernels on a CPU, but {why}.")
    if settings.model.attention_backend == "native":
        raise SettingsError(f"--attention-backend native cannot be used: {why}.")
    if not unwanted:
        log.warning("torch computes, not the native kernels: %s", why)
    return None


def make_recorder(limits_rows: int, chunk_tokens: int) -> Recorder:
    """A recorder with room for the largest step, and for a block of prompt positions whose logprobs are asked."""
    return Recorder(tokens=chunk_tokens + limits_rows, logits=max(limits_rows, INPUT_BLOCK))


def build_native(
    library: ctypes.CDLL,
    model: CausalLM,
    recorder: Recorder,
    pool: KVPool,
    threads: int,
    limits: Limits,
    *,
    deterministic: bool,
) -> NativeExecutor:
    """Records the model, whose weights are loaded, and gives the executor that runs it."""
    torch.set_num_threads(1)  # it samples only; a second pool of threads would compete for the cores
    tapes = NativeTapes(library, model, recorder, pool, threads, limits.chunk_tokens + limits.rows)
    return NativeExecutor(tapes, limits, deterministic=deterministic)


def tell_kernels(formats: Iterable[Format], threads: int, cache: torch.dtype) -> None:
    """What computes, in one line of the log; weights of `formats` may be multiplied in another way in prompts."""
    rows = variant(Format.F32)
    others = {variant(form, prompt=True) for form in formats} - {rows}
    kernels = ", ".join([rows, *(f"{name} for prompts" for name in sorted(others))])
    counted = "1 thread" if threads == 1 else f"{threads} threads"
    log.info("native kernels (%s) on %s, KV cache of %s", kernels, counted, cache)


def _obstacle(settings: Settings, config: ModelConfig, dtype: torch.dtype) -> str | None:
    if dtype != torch.float32:
        return f"they compute in float32, not in {dtype} (--dtype)"
    if cache_dtype(settings.memory.kv_cache_dtype, dtype) not in CACHE_NUMBERS:
        return f"they do not read a KV cache of {settings.memory.kv_cache_dtype}"
    if config.head_dim > MAX_HEAD_DIM or config.head_dim % 2:
        return f"they have no room for heads of {config.head_dim}"
    return why_not_recorded(config)
