"""A CUDA executor from loaded weights: profiles the largest step, gives what is left to the cache, wires the parts."""

from __future__ import annotations

import logging

import numpy as np
import torch

from bough.attention.base import AttentionBackend
from bough.attention.batch import AttentionBatch
from bough.attention.context import ForwardContext
from bough.attention.invariant_backend import InvariantAttention
from bough.attention.registry import build_backend, choose_backends
from bough.attention.torch_backend import TorchAttention, scratch_bytes
from bough.attention.triton_backend import TritonAttention
from bough.core.plan import Limits
from bough.core.settings import Settings
from bough.executor.build import LoadedModel, LoadedWeights, resolve_chunk
from bough.executor.cuda_executor import CudaExecutor
from bough.executor.cuda_inputs import CudaInputs
from bough.executor.graphs import GraphSizes, decode_sizes, mixed_sizes
from bough.executor.mixed_inputs import MixedInputs
from bough.executor.sizing import size_gpu_cache
from bough.executor.staging import Staging
from bough.executor.step_memory import LIBRARY_BYTES, StepShape
from bough.kernels.decode_attention.work import DecodeWork
from bough.kernels.invariant_attention import triton as invariant
from bough.kernels.prefill_attention.triton import PrefillConfig, config_for
from bough.memory.pools.kv_pool import KVPool
from bough.sampling.state import SamplingState

log = logging.getLogger(__name__)

GPU_ROWS = 512
GPU_CHUNK_TOKENS = 8192
RING_DEPTH = 4  # steps whose pinned memory may still be in use: one in flight, one being launched, and some to spare
PROFILE_PAGES = 1  # the profile run writes to the scratch page alone


def build_cuda(loaded: LoadedWeights, settings: Settings) -> LoadedModel:
    config, device = loaded.config, loaded.device
    rows = settings.scheduler.max_running_requests or GPU_ROWS
    chunk = resolve_chunk(settings, config, min(GPU_CHUNK_TOKENS, config.context_length))
    staging = Staging(device, RING_DEPTH)
    forward_bytes = _profile(loaded, settings, rows, chunk, staging)
    shape = StepShape(
        rows=rows,
        chunk_tokens=chunk,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=config.context_length,
        page_size=settings.memory.page_size,
        itemsize=loaded.dtype.itemsize,
    )
    graphs = _graph_sizes(settings, rows, chunk)
    free, total = torch.cuda.mem_get_info(device)
    size = size_gpu_cache(
        settings.memory,
        free_bytes=free,
        total_bytes=total,
        activation_bytes=shape.step_bytes(forward_bytes) + shape.row_bytes() + _attention_bytes(loaded, settings),
        bytes_per_token=KVPool.bytes_per_token(config, loaded.cache_dtype, loaded.topology),
        graph_bytes=LIBRARY_BYTES + shape.graph_bytes(graphs.decode, graphs.mixed, forward_bytes),
    )
    limits = Limits(
        rows, settings.memory.page_size, (size.pages,), config.context_length, config.vocab_size, chunk, size.note
    )
    pool = _pool(loaded, size.pages, limits.page_size)
    inputs = CudaInputs(limits, device, staging)
    block_queries = _prefill_config(loaded).block_queries
    executor = CudaExecutor(
        loaded.model,
        pool,
        _build_attention(loaded, settings, limits, staging),
        limits,
        inputs,
        MixedInputs(limits, block_queries, inputs.page_table, inputs.last_tokens, staging),
        staging,
        SamplingState(rows, config.vocab_size, device),
        graphs=graphs,
    )
    return LoadedModel(executor, config)


def _pool(loaded: LoadedWeights, pages: int, page_size: int) -> KVPool:
    return KVPool(
        loaded.config, pages, page_size, loaded.cache_dtype, loaded.device, loaded.topology, loaded.cache_scales
    )


def _graph_sizes(settings: Settings, rows: int, chunk: int) -> GraphSizes:
    if settings.model.disable_cuda_graph:
        return GraphSizes((), ())
    names = choose_backends(settings.model, "cuda")
    if not names.decodes_capturable:
        log.info("steps run without CUDA graphs: the %s attention back end cannot be captured", names.decode)
        return GraphSizes((), ())
    decode = decode_sizes(min(settings.model.cuda_graph_max_bs_decode or rows, rows))
    mixed = names.prefills_capturable and not settings.model.enable_deterministic_inference
    return GraphSizes(decode, mixed_sizes(chunk, chunk + rows) if mixed else ())


def _build_attention(loaded: LoadedWeights, settings: Settings, limits: Limits, staging: Staging) -> AttentionBackend:
    makers = {
        "triton": lambda: _build_triton(loaded, settings, limits, staging),
        "torch": lambda: TorchAttention(staging.to_device),
    }
    return build_backend(choose_backends(settings.model, "cuda"), makers)


def _build_triton(loaded: LoadedWeights, settings: Settings, limits: Limits, staging: Staging) -> AttentionBackend:
    config, kv_heads = loaded.config, loaded.topology.kv_slice_of(loaded.config.num_kv_heads)
    heads = loaded.topology.share(config.num_heads, "num_heads")
    if settings.model.enable_deterministic_inference:
        shape = (heads, kv_heads.stop - kv_heads.start, config.head_dim, loaded.dtype)
        configs = (invariant.config_for(*shape), invariant.config_for(*shape, prompts=True))
        return InvariantAttention(staging.to_device, limits.rows, *configs, loaded.device)

    def make_work(window: int | None) -> DecodeWork:
        return DecodeWork(
            max_batch=limits.rows,
            heads=heads,
            kv_heads=kv_heads.stop - kv_heads.start,
            head_dim=config.head_dim,
            device=loaded.device,
            window=window,
        )

    return TritonAttention(staging.to_device, make_work, _prefill_config(loaded))


def _prefill_config(loaded: LoadedWeights) -> PrefillConfig:
    config, kv_heads = loaded.config, loaded.topology.kv_slice_of(loaded.config.num_kv_heads)
    heads = loaded.topology.share(config.num_heads, "num_heads")
    return config_for(heads, kv_heads.stop - kv_heads.start, config.head_dim, loaded.dtype)


def _attention_bytes(loaded: LoadedWeights, settings: Settings) -> int:
    """What the torch back end, if it is used, takes for contexts longer than the profile's."""
    names, config = choose_backends(settings.model, "cuda"), loaded.config
    if "torch" not in (names.prefill, names.decode):
        return 0
    heads = loaded.topology.share(config.num_heads, "num_heads")
    kv_heads = loaded.topology.kv_slice_of(config.num_kv_heads)
    capped = config.attention_softcap is not None
    return scratch_bytes(
        config.context_length, heads, kv_heads.stop - kv_heads.start, config.head_dim, loaded.dtype.itemsize, capped
    )


def _profile(loaded: LoadedWeights, settings: Settings, rows: int, chunk: int, staging: Staging) -> int:
    """Runs the largest step there can be on the scratch page; returns how much memory it took beside the weights."""
    config, device = loaded.config, loaded.device
    limits = Limits(1, settings.memory.page_size, (PROFILE_PAGES,), config.context_length, config.vocab_size, chunk, "")
    pool = _pool(loaded, PROFILE_PAGES, limits.page_size)
    attention = _build_attention(loaded, settings, limits, staging)
    tokens = chunk + rows
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    positions = torch.arange(tokens, device=device) % config.context_length
    batch = AttentionBatch(
        rows=torch.zeros(1, dtype=torch.int32, device=device),
        lengths=torch.full((1,), tokens, dtype=torch.int32, device=device),
        decodes=0,
        query_lens=np.array([tokens], dtype=np.int32),
        query_starts=np.array([0, tokens], dtype=np.int32),
        context_lens=np.zeros(1, dtype=np.int32),
        page_table=torch.zeros((1, -(-tokens // limits.page_size)), dtype=torch.int32, device=device),
        slots=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=positions,
        page_size=limits.page_size,
    )
    with torch.inference_mode():
        attention.prepare(batch)
        hidden = loaded.model.forward(torch.zeros_like(positions), positions, ForwardContext(attention, pool, batch))
        logits = loaded.model.logits(hidden[:rows])
        del hidden, logits
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
