"""From settings to a running executor: read the configuration, load the weights, size the cache."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace

import torch

from bough.attention.registry import build_backend
from bough.core.errors import ResourceError, SettingsError
from bough.core.model_config import ModelConfig
from bough.core.plan import Limits
from bough.core.settings import Settings
from bough.distributed.topology import Topology
from bough.executor.machine import free_memory_bytes, usable_cores
from bough.executor.sizing import size_cpu_cache
from bough.executor.threaded import ThreadedExecutor
from bough.executor.torch_executor import TorchExecutor
from bough.loader.config import read_config
from bough.loader.load import load_weights, open_source
from bough.loader.locate import ModelFiles
from bough.memory.pools.kv_pool import KVPool
from bough.models.registry import build_model

log = logging.getLogger(__name__)

CPU_ROWS = 256
CPU_CHUNK_TOKENS = 256  # a step of this size keeps running streams moving while the cores are still well used


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An executor that is ready, with the model's configuration as it is run."""

    executor: ThreadedExecutor
    config: ModelConfig


def resolve_config(files: ModelFiles, settings: Settings) -> ModelConfig:
    """The model's own configuration with the user's changes."""
    try:
        overrides = json.loads(settings.model.json_model_override_args)
    except ValueError as error:
        raise SettingsError(f"--json-model-override-args is not valid JSON: {error}.") from None
    if not isinstance(overrides, dict):
        raise SettingsError("--json-model-override-args must be a JSON object.")
    config = read_config(files, overrides)
    asked = settings.model.context_length
    if asked is not None and asked > config.context_length:
        log.warning("--context-length %d is more than the model was made for (%d)", asked, config.context_length)
    return config if asked is None else replace(config, context_length=asked)


def build_cpu_executor(files: ModelFiles, settings: Settings) -> LoadedModel:
    """Loads the model into memory and measures what is left for the cache."""
    torch.set_num_threads(settings.model.cpu_threads or usable_cores())
    config = resolve_config(files, settings)
    dtype = _resolve_dtype(settings.model.dtype)
    topology = Topology()
    began = time.monotonic()
    source = open_source(files, config, settings.model.load_format)
    before = free_memory_bytes()
    model = build_model(config, topology, dtype, torch.device("cpu"))
    slots = list(model.slots())
    weight_bytes = sum(s.target.nbytes for s in slots)
    if weight_bytes > before:
        raise ResourceError(
            f"The weights need {weight_bytes / 2**30:.2f} GiB as {dtype}, but only {before / 2**30:.2f} GiB are "
            "free; use a smaller model or --dtype bfloat16."
        )
    load_weights(slots, source, progress=True, device=torch.device("cpu"))
    log.info("loaded %.2f GiB of weights as %s in %.1f s", weight_bytes / 2**30, dtype, time.monotonic() - began)

    per_token = KVPool.bytes_per_token(config, dtype, topology)
    size = size_cpu_cache(
        settings.memory,
        free_bytes=free_memory_bytes(),
        weight_bytes=weight_bytes,
        bytes_per_token=per_token,
        context_length=config.context_length,
    )
    limits = Limits(
        rows=settings.scheduler.max_running_requests or CPU_ROWS,
        page_size=settings.memory.page_size,
        pages=(size.pages,),
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        chunk_tokens=_chunk_tokens(settings, config),
        note=size.note,
    )
    pool = KVPool(config, size.pages, limits.page_size, dtype, torch.device("cpu"), topology)
    name = settings.model.attention_backend
    attention = build_backend("torch" if name == "auto" else name)
    return LoadedModel(ThreadedExecutor(TorchExecutor(model, pool, attention, limits)), config)


def _resolve_dtype(name: str) -> torch.dtype:
    # Most CPUs multiply float32 faster than 16-bit numbers, whatever the checkpoint was saved in.
    dtype: torch.dtype = torch.float32 if name == "auto" else getattr(torch, name)
    return dtype


def _chunk_tokens(settings: Settings, config: ModelConfig) -> int:
    asked = settings.scheduler.chunked_prefill_size
    if asked is None:
        return max(CPU_CHUNK_TOKENS, settings.memory.page_size)
    if asked == 0:
        raise SettingsError("chunked_prefill_size must be positive, or -1 for no chunks.")
    if asked < 0:
        return config.context_length
    if asked < settings.memory.page_size:
        raise SettingsError(
            f"chunked_prefill_size ({asked}) must be at least one page (page_size {settings.memory.page_size})."
        )
    return asked
