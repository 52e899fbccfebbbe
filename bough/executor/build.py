"""From settings to a running executor: checks them against the device, loads the model, and sizes the cache."""

import ctypes
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray

from bough.attention.base import AttentionBackend
from bough.attention.reading import ToDevice
from bough.attention.registry import BackendNames, choose_backends
from bough.attention.torch_backend import TorchAttention, leave_out_cudnn
from bough.core.errors import ResourceError, SettingsError
from bough.core.model_config import ModelConfig
from bough.core.parallel_settings import ParallelSettings
from bough.core.plan import Limits
from bough.core.settings import ModelSettings, Settings
from bough.distributed.group import ALONE, RankGroup, SimulatedGroup
from bough.executor.adapters import AdapterStore
from bough.executor.control import ModelControl
from bough.executor.encoder import make_encoder
from bough.executor.load_draft import find_draft, limits_of, per_token_bytes
from bough.executor.load_model import (
    SCALED_PRODUCTS,
    LoadedModel,
    LoadedWeights,
    load_model,
    multiplies_fp8,
    resolve_chunk,
    resolve_config,
    resolve_dtype,
)
from bough.executor.machine import compute_cores, free_memory_bytes
from bough.executor.native_executor import NativeExecutor
from bough.executor.native_recorder import CACHE_NUMBERS, Recorder
from bough.executor.native_tapes import NativeTapes, why_not_recorded
from bough.executor.rank_check import make_check
from bough.executor.sizing import CPU_POOL_SHARE, CacheShape, default_gpu_chunk, default_rows, size_cpu_cache
from bough.executor.threaded import ThreadedExecutor
from bough.executor.torch_executor import TorchExecutor
from bough.executor.weights import WeightStore
from bough.kernels.quant_linear.packed import FOR_FLOATS, Format, variant
from bough.kernels.quant_linear.products import LoneProducts
from bough.loader.load import packed_formats
from bough.loader.locate import ModelFiles
from bough.memory.pools.kv_pool import KVPool, cache_dtype
from bough.native.library import load_library, use_instruction_set, why_absent
from bough.sampling.logprobs import INPUT_BLOCK

log = logging.getLogger(__name__)

Capability = tuple[int, int]  # NVIDIA's, major and minor
FOR_CPUS = ("int8", "int4")  # what --quantization makes of floats there
E4M3_CONVERSION: Capability = (8, 9)


def check_number_formats(settings: Settings, capability: Capability | None) -> None:
    """Raises if the device cannot do what weights and cache are asked to be. A CPU has no capability."""
    _check_weights(settings, capability)
    cache, path = settings.memory.kv_cache_dtype, settings.memory.quantization_param_path
    if not cache.startswith("fp8"):
        if path is not None:
            raise SettingsError("--quantization-param-path is for an fp8 cache; add --kv-cache-dtype fp8_e4m3.")
    elif capability is None:
        raise SettingsError(f"--kv-cache-dtype {cache} needs a GPU; on a CPU use auto or bf16.")
    elif cache == "fp8_e4m3" and capability < E4M3_CONVERSION:
        raise SettingsError(f"--kv-cache-dtype fp8_e4m3 needs a GPU of {_spelled(E4M3_CONVERSION)}; use fp8_e5m2.")


def _check_weights(settings: Settings, capability: Capability | None) -> None:
    if settings.model.quantization == "int8" and capability is not None:
        raise SettingsError("--quantization int8 is for CPUs; on a GPU use auto, none, fp8 or int4.")
    if settings.model.quantization != "fp8":
        return
    if capability is None:
        raise SettingsError(f"--quantization fp8 needs a GPU; on a CPU use auto, none, {' or '.join(FOR_CPUS)}.")
    if not multiplies_fp8(capability):
        raise SettingsError(f"--quantization fp8 needs an NVIDIA GPU of {_spelled(SCALED_PRODUCTS)}; use none.")
    if settings.model.dtype not in ("auto", "bfloat16"):
        raise SettingsError(f"--quantization fp8 computes in bfloat16; leave out --dtype {settings.model.dtype}.")


def _spelled(capability: Capability) -> str:
    return "compute capability {}.{} or newer".format(*capability)


MAX_HEAD_DIM = 256  # BOUGH_MAX_HEAD_DIM of src/ops.h
CPU_ROWS = 256
ENCODER_CHUNK_TOKENS = 2048  # at least a whole text; nobody waits for a token of another
CPU_CHUNK_TOKENS = 256  # a step of this size keeps running streams moving while the cores are still well used


def build_executor(files: ModelFiles, settings: Settings, group: RankGroup = ALONE) -> LoadedModel:
    """Loads the model, or this rank's share, onto the device and gives what memory is left to the cache."""
    if settings.parallel.simulate_tp > 1:
        group = simulated(settings.parallel)
    else:
        for name, size in (("tp", group.topology.all_groups.tp_size), ("pp", group.topology.pp_size)):
            asked = getattr(settings.parallel, f"{name}_size")
            if asked != size:
                raise SettingsError(f"--{name}-size {asked}: this command runs the model in one process.")
    device = resolve_device(settings.model)
    # A name that is not there must not cost the loading of a model.
    names = choose_backends(settings.model, device.type)
    check_number_formats(settings, None if device.type == "cpu" else torch.cuda.get_device_capability(device))
    check_deterministic(settings.model, names, device.type)
    if settings.lora.enable_lora and settings.model.enable_deterministic_inference and device.type == "cuda":
        raise SettingsError("--enable-lora does not go with --enable-deterministic-inference on a GPU; leave one out.")
    if settings.scheduler.enable_return_routed_experts and settings.parallel.pp_size * settings.parallel.groups > 1:
        others = "leave out --pp-size and --enable-dp-attention"
        raise SettingsError(f"--enable-return-routed-experts needs all layers of a token on each rank; {others}.")
    check_cache_readers(settings.memory.kv_cache_dtype, names)
    if device.type == "cpu":
        use_instruction_set(settings.model.cpu_instruction_set)
        return _build_synchronous(files, settings, names, group, device)
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32, as in products of matrices
    if (config := resolve_config(files, settings)).vectors is not None or config.speech is not None:
        return _build_synchronous(files, settings, names, group, device)
    from bough.executor.cuda_parts import build_cuda  # needs triton
    from bough.executor.warm_up import KernelMakers

    here = torch.cuda.current_device()
    try:
        with KernelMakers(lambda: torch.cuda.set_device(here)) as makers:
            draft = find_draft(settings, files, config)
            loaded = load_model(files, settings, config, device, group=group)
            return build_cuda(loaded, files, settings, makers, None if draft is None else draft.load(settings, loaded))
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ResourceError(
            f"The GPU's memory ({total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of them free) is too small for the "
            "model and its largest step; use a smaller model, --quantization fp8, or lower --chunked-prefill-size and "
            "--max-running-requests."
        ) from error


def simulated(settings: ParallelSettings) -> RankGroup:
    if settings.replica_ranks > 1:
        raise SettingsError("--simulate-tp runs one rank alone: leave out --tp-size and --pp-size.")
    log.warning(
        "--simulate-tp %d: this is one rank's share, and the other ranks are not there. Times and memory are those of "
        "a rank whose exchanges take no time; answers mean nothing.",
        settings.simulate_tp,
    )
    return SimulatedGroup(settings.simulate_tp, settings.ep_size)


def resolve_device(settings: ModelSettings) -> torch.device:
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise SettingsError("--device cuda: torch sees no CUDA device here; `bough doctor` tells what is missing.")
    return torch.device("cuda" if available and settings.device in ("auto", "cuda") else "cpu")


def check_cache_readers(cache_dtype: str, names: BackendNames) -> None:
    """torch's back end computes in the cache's own numbers."""
    if cache_dtype.startswith("fp8") and "torch" in (names.prefill, names.decode):
        text = f"--kv-cache-dtype {cache_dtype} is not read by the torch attention back end; use triton for both."
        raise SettingsError(text)


def check_deterministic(settings: ModelSettings, names: BackendNames, device_type: str) -> None:
    """The libraries for 8-bit numbers sum in an order that depends on the number of rows, and only one kernel of
    attention does not depend on the batch. On a CPU it is the native kernels that do not."""
    if not settings.enable_deterministic_inference or device_type != "cuda":
        return
    if "torch" in (names.prefill, names.decode):
        text = "--enable-deterministic-inference has its own attention in Triton"
        raise SettingsError(f"{text}; leave the torch attention back end out.")
    if settings.quantization in ("fp8", "int4"):
        text = f"--enable-deterministic-inference does not go with --quantization {settings.quantization} on a GPU"
        raise SettingsError(f"{text}; leave one of them out.")


def _build_synchronous(
    files: ModelFiles, settings: Settings, names: BackendNames, group: RankGroup, device: torch.device
) -> LoadedModel:
    """On a CPU; on a GPU for models that give vectors or hear: their steps are prompts, or few of a small decoder."""
    topology, sharing = group.topology, settings.parallel.ranks_per_node  # this host's cores and memory
    threads, on_cpu = settings.model.cpu_threads or max(1, compute_cores() // sharing), device.type == "cpu"
    torch.set_num_threads(threads)
    config = resolve_config(files, settings)
    rows = settings.scheduler.max_running_requests or CPU_ROWS
    chunk = resolve_chunk(settings, config, CPU_CHUNK_TOKENS if on_cpu else default_gpu_chunk(config))
    draft = find_draft(settings, files, config)
    if not config.causal:
        chunk = max(chunk, ENCODER_CHUNK_TOKENS, config.context_length)
    dtype, products = resolve_dtype(settings.model, config, device), None
    library = native_library(settings, names, config, dtype) if on_cpu else None
    if library is not None and config.speech is not None:  # for its products alone
        library, products = None, LoneProducts(threads).ops
    # With room for the largest step, and for a block of prompt positions whose logprobs are asked.
    logits = max(rows + settings.speculative.step_drafts, INPUT_BLOCK)
    recorder = None if library is None else Recorder(tokens=chunk + rows, logits=logits)
    free = free_bytes_on(device, sharing)
    loaded = load_model(files, settings, config, device, products if recorder is None else recorder.ops, group)
    beside = None if draft is None else draft.load(settings, loaded)
    held = topology.held(config)
    per_token = per_token_bytes(loaded, beside)
    # Weights that are mapped still count as free, as cached files do; but every step reads them.
    left = max(0, min(free_bytes_on(device, sharing), free - loaded.weight_bytes))
    (left,) = group.minimum([left])
    rows = settings.scheduler.max_running_requests or default_rows(held, rows, int(left * CPU_POOL_SHARE))
    shape = CacheShape.of(config, per_token, settings.memory, rows, chunk, topology)
    size = size_cpu_cache(
        settings.memory,
        free_bytes=left,
        weight_bytes=loaded.weight_bytes,
        shape=shape,
        context_length=config.context_length,
    ).shared(group.minimum)
    limits = limits_of(loaded, beside, settings, rows, chunk, shape, size, shares_reads=library is not None)
    pool = KVPool(config, limits.pages, limits.page_size, loaded.cache_dtype, loaded.device, topology)
    weights = WeightStore(loaded, files, settings)
    adapters = None if loaded.adapters is None else AdapterStore(loaded, loaded.adapters, settings.lora)
    if library is not None and recorder is not None:
        deterministic = settings.model.enable_deterministic_inference
        torch.set_num_threads(1)  # it samples only; a second pool of threads would compete for the cores
        tapes = NativeTapes(library, loaded.model, recorder, pool, threads, chunk + rows)
        control = ModelControl(weights, pool, drop=tapes.drop, rebuild=tapes.record, adapters=adapters)
        native = NativeExecutor(tapes, limits, control, make_encoder(loaded), deterministic)
        formats = [] if deterministic else packed_formats(loaded.model.slots())
        tell_kernels(formats, threads, pool.dtype)
        return LoadedModel(ThreadedExecutor(native), config, loaded.weight_bytes, loaded.load_s)
    check = make_check(settings.parallel.check_ranks, group, device)
    drafter = None if beside is None else beside.drafter(limits, pool, TorchAttention())
    attention, to_device, begin = _attention_on(loaded, settings, limits)
    more = (weights, group, check, drafter, adapters, make_encoder(loaded, to_device), to_device)
    torch_executor = TorchExecutor(loaded.model, pool, attention, limits, *more)
    return LoadedModel(ThreadedExecutor(torch_executor, begin), config, loaded.weight_bytes, loaded.load_s)


def free_bytes_on(device: torch.device, sharing: int) -> int:
    """What each of those that share the device's memory can still use."""
    return free_memory_bytes() // sharing if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _attention_on(
    loaded: LoadedWeights, settings: Settings, limits: Limits
) -> tuple[AttentionBackend, ToDevice, Callable[[], None]]:
    """What attends, what takes arrays to the device, and what the executor's thread begins with."""
    if loaded.device.type == "cpu":
        return TorchAttention(), torch.from_numpy, lambda: None
    from bough.executor.cuda_parts import build_attention  # needs triton

    def to_device(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(loaded.device)

    begin = partial(torch.cuda.set_device, torch.cuda.current_device())
    if loaded.config.causal and loaded.config.speech is None:
        return build_attention(loaded, settings, limits, to_device), to_device, begin
    leave_out_cudnn()
    return TorchAttention(to_device, together=True, packed=loaded.dtype.itemsize == 2), to_device, begin


def native_library(
    settings: Settings, names: BackendNames, config: ModelConfig, dtype: torch.dtype
) -> ctypes.CDLL | None:
    """The compiled kernels, if this engine is to use them; else one line says why not, unless that was asked for."""
    unwanted = (names.prefill, names.decode) != ("native", "native")
    why = "torch attention is asked for (--attention-backend)" if unwanted else native_obstacle(settings, config, dtype)
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


def tell_kernels(formats: Iterable[Format], threads: int, cache: torch.dtype) -> None:
    """What computes, in one line of the log; weights of `formats` may be multiplied in another way in prompts."""
    rows = variant(Format.F32)
    others = {variant(form, prompt=True) for form in formats} - {rows}
    kernels = ", ".join([rows, *(f"{name} for prompts" for name in sorted(others))])
    counted = "1 thread" if threads == 1 else f"{threads} threads"
    log.info("native kernels (%s) on %s, KV cache of %s", kernels, counted, cache)


def native_obstacle(settings: Settings, config: ModelConfig, dtype: torch.dtype) -> str | None:
    if max(settings.parallel.tp_size, settings.parallel.simulate_tp) > 1:
        return "they cannot add up the results of several ranks (--tp-size)"
    if settings.parallel.pp_size > 1:
        return "they do not pass hidden states from stage to stage (--pp-size)"
    if config.media is not None:
        return "they do not take images, which this model reads (--no-enable-multimodal has it read text alone)"
    if settings.parallel.expert_distribution_recorder_mode is not None:
        return "they do not count how often experts are chosen (--expert-distribution-recorder-mode)"
    if settings.scheduler.enable_return_routed_experts:
        return "they do not tell which experts are chosen (--enable-return-routed-experts)"
    if settings.speculative.has_model:
        return f"they run no draft models (--speculative-algorithm {settings.speculative.speculative_algorithm})"
    if dtype != torch.float32:
        return f"they compute in float32, not in {dtype} (--dtype)"
    if cache_dtype(settings.memory.kv_cache_dtype, dtype) not in CACHE_NUMBERS:
        return f"they do not read a KV cache of {settings.memory.kv_cache_dtype}"
    if config.head_dim > MAX_HEAD_DIM or config.head_dim % 2:
        return f"they have no room for heads of {config.head_dim}"
    if config.speech is not None and settings.model.quantization in FOR_FLOATS:
        return None
    return why_not_recorded(config)
