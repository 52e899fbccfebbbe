"""A rehearsal before the first request: measures the largest step, and compiles what any engine needs at once.

Compiling the kernels takes most of a cold start. So the largest step, a short prompt and decodes are first walked
through, to have all their kernels compiled side by side, and then run. What they leave behind is the kernels and the
number of bytes. What only some requests need is left to quiet moments: see `warm_up`.
"""

from __future__ import annotations

import numpy as np
import torch

from bough.attention.context import ForwardContext
from bough.core.plan import BatchPlan, Limits
from bough.core.settings import Settings
from bough.executor.cuda_parts import assemble, build_attention, build_pool
from bough.executor.graphs import GraphSizes
from bough.executor.kernel_makers import KernelMakers
from bough.executor.load_model import LoadedWeights
from bough.executor.padding import padding_batch
from bough.executor.plain_plans import decode_plan, prompt_plan
from bough.executor.staging import Staging
from bough.kernels.projected_decode.triton import MOST_ROWS

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
    groups = len(loaded.config.kv_groups)
    prompt = prompt_plan(0, np.arange(PROMPT_TOKENS, dtype=np.int32), pages, (PROMPT_TOKENS,) * groups)
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
    pages = (PROMPT_TOKENS,) * len(config.kv_groups)
    limits = Limits(len(plan.rows), page_size, pages, config.context_length, config.vocab_size, PROMPT_TOKENS, "")
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
        logits = loaded.model.logits(hidden[:rows])
        del hidden, logits
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
