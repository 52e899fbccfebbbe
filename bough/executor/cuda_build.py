"""A CUDA executor from loaded weights: rehearses, and gives what memory is left to the cache.

The rehearsal measures the largest step and compiles what any engine needs: the largest step, a short prompt and decodes
are first walked through, to have their kernels compiled side by side, and then run. See `warm_up` for the rest.
"""

from __future__ import annotations

import numpy as np
import torch

from bough.attention.context import ForwardContext
from bough.core.errors import ModelError
from bough.core.plan import BatchPlan, Limits
from bough.core.settings import Settings
from bough.executor.cuda_parts import (
    assemble,
    attention_bytes,
    build_attention,
    build_pool,
    graph_sizes,
    shares_reads,
)
from bough.executor.graphs import GraphSizes
from bough.executor.kernel_makers import KernelMakers
from bough.executor.load_draft import LoadedDraft, per_token_bytes
from bough.executor.load_model import LoadedModel, LoadedWeights, resolve_chunk
from bough.executor.plain_plans import decode_plan, padding_batch, prompt_plan
from bough.executor.sizing import (
    GPU_FRACTION,
    GPU_ROWS,
    GRAPH_BYTES,
    LIBRARY_BYTES,
    STEP_WIDTHS,
    CacheShape,
    StepShape,
    default_gpu_chunk,
    default_rows,
    size_gpu_cache,
)
from bough.executor.staging import Staging
from bough.executor.weights import WeightStore
from bough.kernels.projected_decode.triton import MOST_ROWS
from bough.kernels.sampling.rows import MAX_VOCAB_SIZE
from bough.loader.locate import ModelFiles

# Products are cut into tiles of up to 256 rows, which are spread over some hundred processors: those of an 8B model
# take an eighth longer for 1,600 tokens than for 1,536 (`gpu_bench_step_sizes.py`).
GPU_EVEN_TOKENS = 512
ENCODER_BYTES = 1 << 30  # for what encoders compute in one step, which is not measured


def build_cuda(
    loaded: LoadedWeights,
    files: ModelFiles,
    settings: Settings,
    makers: KernelMakers,
    draft: LoadedDraft | None = None,
) -> LoadedModel:
    config, held, device = loaded.config, loaded.topology.held(loaded.config), loaded.device
    if config.vocab_size > MAX_VOCAB_SIZE:
        raise ModelError(
            f"The model has {config.vocab_size} tokens; on a GPU at most {MAX_VOCAB_SIZE} can be sampled from."
        )
    (free,) = loaded.group.minimum([torch.cuda.mem_get_info(device)[0]])
    rows = settings.scheduler.max_running_requests or default_rows(held, GPU_ROWS, int(free * GPU_FRACTION))
    chunk = resolve_chunk(settings, config, default_gpu_chunk(config))
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
        drafts=settings.speculative.step_drafts,
    )
    graphs = graph_sizes(loaded, settings, step, forward_bytes)
    free, total = torch.cuda.mem_get_info(device)
    per_token = per_token_bytes(loaded, draft)
    shape = CacheShape.of(config, per_token, settings.memory, rows, chunk, loaded.topology)
    # What the draft model's part of the largest step takes is not measured.
    others = 0 if draft is None else STEP_WIDTHS * config.hidden_size * loaded.dtype.itemsize * (rows + chunk)
    others += step.row_bytes() + attention_bytes(loaded, settings, rows)
    if config.media is not None:
        others += (settings.memory.mm_cache_size_mb << 20) + ENCODER_BYTES
    size = size_gpu_cache(
        settings.memory,
        free_bytes=free,
        total_bytes=total,
        activation_bytes=step.step_bytes(forward_bytes) + others,
        shape=shape,
        graph_bytes=LIBRARY_BYTES + graphs.scratch_bytes + graphs.count * GRAPH_BYTES,
    ).shared(loaded.group.minimum)
    limits = Limits(
        rows,
        settings.memory.page_size,
        size.pages,
        config.context_length,
        config.vocab_size,
        chunk,
        size.note,
        even_tokens=GPU_EVEN_TOKENS,
        late_plans=loaded.topology.pp_size == 1,
        groups=config.kv_groups,
        page_bytes=shape.page_bytes(settings.memory.page_size),
        cache_dtype=str(loaded.cache_dtype),
        shares_reads=shares_reads(loaded, settings),
        ranks=loaded.topology.tp_size,
        stages=loaded.topology.pp_size,
        in_step=loaded.topology.dp_size > 1,
        media=loaded.media_limits,
        drafts=0 if draft is None else settings.speculative.most_drafts,
        adaptive_drafts=settings.speculative.speculative_adaptive,
    )
    weights = WeightStore(loaded, files, settings)
    executor = assemble(loaded, settings, limits, graphs, weights, draft)
    return LoadedModel(executor, config, loaded.weight_bytes, loaded.load_s)


SCRATCH_PAGES = 1  # the largest step writes to page 0 alone
PROMPT_TOKENS = 8


def rehearse(loaded: LoadedWeights, settings: Settings, rows: int, chunk: int, makers: KernelMakers) -> int:
    """How much memory the forward pass of the largest step takes beside the weights, in bytes."""
    with makers.instead_of_launches():
        _run_all(loaded, settings, rows, chunk)
    peak = _run_all(loaded, settings, rows, chunk)
    torch.cuda.synchronize(loaded.device)
    torch.cuda.empty_cache()
    return peak


def _run_all(loaded: LoadedWeights, settings: Settings, rows: int, chunk: int) -> int:
    """Each kind of step; returns how much memory the largest took."""
    pages = np.arange(1, 1 + -(-PROMPT_TOKENS // settings.memory.page_size), dtype=np.int32)
    kinds, groups = loaded.config.kv_groups, len(loaded.config.kv_groups)
    prompt = prompt_plan(0, np.arange(PROMPT_TOKENS, dtype=np.int32), pages, (PROMPT_TOKENS,) * groups, kinds)
    for plan in (
        prompt,
        decode_plan(0, 1, groups),
        decode_plan(0, MOST_ROWS + 1, groups),
    ):  # few have kernels of their own
        _run(loaded, settings, plan)
    return _measure(loaded, settings, rows, chunk)


def _run(loaded: LoadedWeights, settings: Settings, plan: BatchPlan) -> None:
    """One small step on an executor of its own."""
    config, page_size = loaded.config, settings.memory.page_size
    pages, rows = (PROMPT_TOKENS,) * len(config.kv_groups), len(plan.rows)
    shape = (config.context_length, config.vocab_size, PROMPT_TOKENS, "")
    limits = Limits(rows, page_size, pages, *shape, groups=config.kv_groups)
    assemble(loaded, settings, limits, GraphSizes()).launch(plan).wait()


def _measure(loaded: LoadedWeights, settings: Settings, rows: int, chunk: int) -> int:
    """Runs the largest step there can be on the scratch page; returns how much memory it took beside the weights."""
    config, device = loaded.config, loaded.device
    pages = (SCRATCH_PAGES,) * len(config.kv_groups)
    limits = Limits(1, settings.memory.page_size, pages, config.context_length, config.vocab_size, chunk, "")
    pool = build_pool(loaded, pages, limits.page_size)
    attention = build_attention(loaded, settings, limits, Staging(device, depth=1))
    tokens = chunk + rows
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    batch = padding_batch(tokens, config.context_length, limits.page_size, device, len(pages))
    ids, positions = torch.zeros_like(batch.positions), batch.positions
    with torch.inference_mode():
        attention.prepare(batch)
        hidden = loaded.model.forward(ids, positions, ForwardContext(attention, pool, batch))
        if loaded.topology.is_last:
            loaded.model.logits(hidden[:rows])
        del hidden
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
