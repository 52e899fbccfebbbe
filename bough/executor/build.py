"""From settings to a running executor: read the configuration, load the weights, size the cache."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from dataclasses import dataclass, replace

import torch

from bough.attention.registry import BackendNames, choose_backends
from bough.attention.torch_backend import TorchAttention
from bough.core.errors import ResourceError, SettingsError
from bough.core.model_config import ModelConfig
from bough.core.plan import Executor, Limits
from bough.core.settings import ModelSettings, Settings
from bough.distributed.topology import Topology
from bough.executor.formats import capability_of, check_number_formats
from bough.executor.machine import compute_cores, free_memory_bytes
from bough.executor.native_build import build_native, make_recorder, native_library, tell_kernels
from bough.executor.sizing import size_cpu_cache
from bough.executor.threaded import ThreadedExecutor
from bough.executor.threads import measure_threads
from bough.executor.torch_executor import TorchExecutor
from bough.kernels.packed_ops import PackedOps
from bough.kernels.quant_linear.packed import Format
from bough.loader.config import read_config
from bough.loader.kv_scales import Scales, checkpoint_scales, file_scales
from bough.loader.load import load_weights, open_source, packed_cache, packed_formats
from bough.loader.locate import ModelFiles
from bough.loader.packed_size import packed_size
from bough.loader.source import WeightSource
from bough.memory.pools.kv_pool import KVPool, cache_dtype
from bough.models.base import CausalLM
from bough.models.registry import build_model
from bough.native.library import use_instruction_set

log = logging.getLogger(__name__)

CPU_ROWS = 256
CPU_CHUNK_TOKENS = 256  # a step of this size keeps running streams moving while the cores are still well used


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An executor that is ready, with the model's configuration as it is run."""

    executor: Executor
    config: ModelConfig


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A model in memory, not yet able to run."""

    model: CausalLM
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    topology: Topology
    weight_bytes: int
    cache_dtype: torch.dtype
    cache_scales: Scales | None = None  # where the cache has 8 bits


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


def build_executor(files: ModelFiles, settings: Settings) -> LoadedModel:
    """Loads the model onto the device and gives what memory is left to the cache."""
    device = resolve_device(settings.model)
    # A name that is not there must not cost the loading of a model.
    names = choose_backends(settings.model, device.type)
    check_number_formats(settings, capability_of(device))
    check_deterministic(settings.model, names, device.type)
    check_cache_readers(settings.memory.kv_cache_dtype, names)
    if device.type == "cpu":
        use_instruction_set(settings.model.cpu_instruction_set)
        return _build_cpu(files, settings, names)
    from bough.executor.cuda_build import build_cuda  # needs triton
    from bough.executor.kernel_makers import KernelMakers

    here = torch.cuda.current_device()
    try:
        with KernelMakers(lambda: torch.cuda.set_device(here)) as makers:
            return build_cuda(_load(files, settings, resolve_config(files, settings), device), settings, makers)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ResourceError(
            f"The GPU's memory ({total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of them free) is too small for the "
            "model and its largest step; use a smaller model, --quantization fp8, or lower --chunked-prefill-size and "
            "--max-running-requests."
        ) from error


def resolve_device(settings: ModelSettings) -> torch.device:
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise SettingsError("--device cuda: torch sees no CUDA device here; `bough doctor` tells what is missing.")
    return torch.device("cuda" if available and settings.device in ("auto", "cuda") else "cpu")


def check_cache_readers(cache_dtype: str, names: BackendNames) -> None:
    """torch's back end computes in the cache's own numbers."""
    if cache_dtype.startswith("fp8") and "torch" in (names.prefill, names.decode):
        raise SettingsError(
            f"--kv-cache-dtype {cache_dtype} is not read by the torch attention back end; use triton for both."
        )


def check_deterministic(settings: ModelSettings, names: BackendNames, device_type: str) -> None:
    """The libraries for 8-bit numbers sum in an order that depends on the number of rows, and only one kernel of
    attention does not depend on the batch. On a CPU it is the native kernels that do not."""
    if not settings.enable_deterministic_inference or device_type != "cuda":
        return
    if "torch" in (names.prefill, names.decode):
        raise SettingsError(
            "--enable-deterministic-inference has its own attention in Triton; leave the torch attention back end out."
        )
    if settings.quantization == "fp8":
        raise SettingsError(
            "--enable-deterministic-inference does not go with --quantization fp8; leave one of them out."
        )


def _load(
    files: ModelFiles,
    settings: Settings,
    config: ModelConfig,
    device: torch.device,
    packed_ops: PackedOps | None = None,
) -> LoadedWeights:
    dtype = _resolve_dtype(settings.model, config, device)
    topology = Topology()
    began = time.monotonic()
    load_format = settings.model.load_format if settings.model.model_shape is None else "dummy"
    source = open_source(files, config, load_format, device)
    free = free_memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    model = build_model(
        config,
        topology,
        dtype,
        device,
        quantization=settings.model.quantization,
        deterministic=settings.model.enable_deterministic_inference,
        packed_ops=packed_ops,
    )
    slots = list(model.slots())
    if packed_ops is not None:
        weight_bytes, instead = packed_size(source, settings.model.quantization).nbytes, "--quantization int4"
    else:
        weight_bytes, instead = sum(s.target.nbytes for s in slots), "--dtype bfloat16"
    if device.type == "cpu" and weight_bytes > free:
        raise ResourceError(
            f"The weights need {weight_bytes / 2**30:.2f} GiB, but only {free / 2**30:.2f} GiB are free; use a smaller "
            f"model or {instead}."
        )
    cached = packed_ops is not None and load_format != "dummy"
    kept_on_disk = packed_cache(files, settings.model.quantization) if cached else None
    load_weights(slots, source, progress=True, device=device, cache=kept_on_disk)
    weight_bytes = sum(s.nbytes for s in slots)
    packed = packed_formats(slots)
    kept = _kept_as(packed, settings, dtype)
    log.info("loaded %.2f GiB of weights as %s in %.1f s", weight_bytes / 2**30, kept, time.monotonic() - began)
    # Where weights are rounded to 4 or 8 bits, the cache need not have more than 16.
    cache_like = dtype if all(form.is_float for form in packed) else torch.float16
    cache = cache_dtype(settings.memory.kv_cache_dtype, cache_like)
    scales = _cache_scales(settings, source, config) if cache.itemsize == 1 else None
    return LoadedWeights(model, config, dtype, device, topology, weight_bytes, cache, scales)


def _kept_as(packed: Counter[Format], settings: Settings, dtype: torch.dtype) -> str:
    """In which numbers the weights are, for the log."""
    if settings.model.quantization == "fp8":
        return f"{dtype}, linear layers as fp8"
    return ", ".join(f"{count} x {form.name}" for form, count in packed.most_common()) or str(dtype)


def _cache_scales(settings: Settings, source: WeightSource, config: ModelConfig) -> Scales:
    path = settings.memory.quantization_param_path
    if path is not None:
        return file_scales(path, config.num_layers)
    return checkpoint_scales(source, config.num_layers)


def _build_cpu(files: ModelFiles, settings: Settings, names: BackendNames) -> LoadedModel:
    device, threads = torch.device("cpu"), settings.model.cpu_threads or compute_cores()
    torch.set_num_threads(threads)
    config = resolve_config(files, settings)
    rows = settings.scheduler.max_running_requests or CPU_ROWS
    chunk = resolve_chunk(settings, config, CPU_CHUNK_TOKENS)
    library = native_library(settings, names, config, _resolve_dtype(settings.model, config, device))
    recorder = None if library is None else make_recorder(rows, chunk)
    free = free_memory_bytes()
    loaded = _load(files, settings, config, device, None if recorder is None else recorder.ops)
    topology = loaded.topology
    size = size_cpu_cache(
        settings.memory,
        # Weights that are mapped still count as free, as cached files do; but every step reads them.
        free_bytes=max(0, min(free_memory_bytes(), free - loaded.weight_bytes)),
        weight_bytes=loaded.weight_bytes,
        bytes_per_token=KVPool.bytes_per_token(config, loaded.cache_dtype, topology),
        context_length=config.context_length,
    )
    limits = Limits(
        rows=rows,
        page_size=settings.memory.page_size,
        pages=(size.pages,),
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        chunk_tokens=chunk,
        note=size.note,
    )
    pool = KVPool(config, size.pages, limits.page_size, loaded.cache_dtype, loaded.device, topology)
    if library is not None and recorder is not None:
        deterministic = settings.model.enable_deterministic_inference
        native = build_native(library, loaded.model, recorder, pool, threads, limits, deterministic=deterministic)
        if settings.model.cpu_threads is None:
            measure_threads(native, native.set_threads, threads)
        formats = [] if deterministic else packed_formats(loaded.model.slots())
        tell_kernels(formats, native.threads, pool.dtype)
        return LoadedModel(ThreadedExecutor(native), config)
    return LoadedModel(ThreadedExecutor(TorchExecutor(loaded.model, pool, TorchAttention(), limits)), config)


def _resolve_dtype(settings: ModelSettings, config: ModelConfig, device: torch.device) -> torch.dtype:
    name = settings.dtype
    if name == "auto" and device.type == "cpu":
        name = "float32"  # most CPUs multiply it faster than 16-bit numbers, whatever the checkpoint was saved in
    elif name == "auto":
        # Products of 8-bit weights are bfloat16.
        name = "float16" if config.dtype == "float16" and settings.quantization != "fp8" else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_chunk(settings: Settings, config: ModelConfig, default: int) -> int:
    """Prompt tokens in one step, of which there are never more than `max_prefill_tokens`."""
    most = max(settings.scheduler.max_prefill_tokens, settings.memory.page_size)
    return min(_asked_chunk(settings, config, default), most)


def _asked_chunk(settings: Settings, config: ModelConfig, default: int) -> int:
    asked = settings.scheduler.chunked_prefill_size
    if asked is None:
        return max(default, settings.memory.page_size)
    if asked == 0:
        raise SettingsError("chunked_prefill_size must be positive, or -1 for no chunks.")
    if asked < 0:
        return config.context_length
    if asked < settings.memory.page_size:
        raise SettingsError(
            f"chunked_prefill_size ({asked}) must be at least one page (page_size {settings.memory.page_size})."
        )
    return asked
