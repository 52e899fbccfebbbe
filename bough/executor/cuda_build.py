"""A CUDA executor from loaded weights: rehearses, and gives what memory is left to the cache."""

from __future__ import annotations

import torch

from bough.core.errors import ModelError
from bough.core.plan import Limits
from bough.core.settings import Settings
from bough.executor.cuda_parts import assemble, attention_bytes, graph_sizes
from bough.executor.kernel_makers import KernelMakers
from bough.executor.load_model import LoadedModel, LoadedWeights, resolve_chunk
from bough.executor.rehearsal import rehearse
from bough.executor.sizing import CacheShape, size_gpu_cache
from bough.executor.step_memory import GRAPH_BYTES, LIBRARY_BYTES, StepShape
from bough.kernels.sampling.rows import MAX_VOCAB_SIZE
from bough.memory.pools.kv_pool import KVPool

GPU_ROWS = 512
GPU_CHUNK_TOKENS = 8192
# Products are cut into tiles of up to 256 rows, which are spread over some hundred processors: those of an 8B model
# take an eighth longer for 1,600 tokens than for 1,536 (`gpu_bench_step_sizes.py`).
GPU_EVEN_TOKENS = 512


def build_cuda(loaded: LoadedWeights, settings: Settings, makers: KernelMakers) -> LoadedModel:
    config, device = loaded.config, loaded.device
    if config.vocab_size > MAX_VOCAB_SIZE:
        raise ModelError(
            f"The model has {config.vocab_size} tokens; on a GPU at most {MAX_VOCAB_SIZE} can be sampled from."
        )
    rows = settings.scheduler.max_running_requests or GPU_ROWS
    chunk = resolve_chunk(settings, config, min(GPU_CHUNK_TOKENS, config.context_length))
    forward_bytes = rehearse(loaded, settings, rows, chunk, makers)
    widened = settings.model.enable_deterministic_inference or config.logit_softcap is not None
    step = StepShape(
        rows=rows,
        chunk_tokens=chunk,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=config.context_length,
        page_size=settings.memory.page_size,
        itemsize=loaded.dtype.itemsize,
        logit_itemsize=4 if widened else loaded.dtype.itemsize,
    )
    graphs = graph_sizes(loaded, settings, step, forward_bytes)
    free, total = torch.cuda.mem_get_info(device)
    per_token = KVPool.bytes_per_token(config, loaded.cache_dtype, loaded.topology)
    size = size_gpu_cache(
        settings.memory,
        free_bytes=free,
        total_bytes=total,
        activation_bytes=step.step_bytes(forward_bytes) + step.row_bytes() + attention_bytes(loaded, settings),
        shape=CacheShape.of(config, per_token, settings.memory, rows, chunk),
        graph_bytes=LIBRARY_BYTES + graphs.scratch_bytes + graphs.count * GRAPH_BYTES,
    )
    limits = Limits(
        rows,
        settings.memory.page_size,
        size.pages,
        config.context_length,
        config.vocab_size,
        chunk,
        size.note,
        even_tokens=GPU_EVEN_TOKENS,
        late_plans=True,
        groups=config.kv_groups,
    )
    return LoadedModel(assemble(loaded, settings, limits, graphs), config)
