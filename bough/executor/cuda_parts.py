"""A CUDA executor from loaded weights, and small ones for rehearsals: its parts, wired, and the memory that it gets.

The rehearsal measures the largest step and compiles what any engine needs: the largest step, a short prompt and decodes
are first walked through, to have their kernels compiled side by side, and then run. See `warm_up` for the rest. The
cache gets what memory is left.
"""

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch

from bough.attention import latent_prompts
from bough.attention.base import AttentionBackend, AttentionSpec
from bough.attention.context import ForwardContext, MediaRows
from bough.attention.invariant_backend import InvariantAttention
from bough.attention.latent_prompts import LatentPrompts
from bough.attention.reading import ToDevice
from bough.attention.registry import CAPTURABLE, build_backend, choose_backends
from bough.attention.torch_backend import TorchAttention, leave_out_cudnn, scratch_bytes
from bough.attention.triton_backend import TritonAttention
from bough.core.errors import ModelError, SettingsError
from bough.core.plan import BatchPlan, Limits
from bough.core.settings import DRAFTED_ROWS, STEP_DRAFTS, Settings
from bough.executor import sizing
from bough.executor.adapters import AdapterInputs, AdapterStore
from bough.executor.cuda_drafts import MOST_TOKENS, drafted_sizes
from bough.executor.cuda_executor import CudaExecutor
from bough.executor.cuda_inputs import CudaInputs, MixedInputs
from bough.executor.encoder import make_encoder
from bough.executor.graphs import GraphSizes, decode_sizes, mixed_sizes
from bough.executor.load_draft import LoadedDraft, limits_of, per_token_bytes
from bough.executor.load_model import LoadedModel, LoadedWeights, resolve_chunk
from bough.executor.plain_plans import decode_plan, padding_batch, prompt_plan
from bough.executor.rank_check import make_check
from bough.executor.staging import Staging
from bough.executor.warm_up import KernelMakers
from bough.executor.weights import WeightStore
from bough.kernels.decode_attention.shared import MIN_DOT, SharedWork
from bough.kernels.decode_attention.triton import LATENT_WORK, head_blocks
from bough.kernels.decode_attention.work import DecodeWork
from bough.kernels.invariant_attention import triton as invariant
from bough.kernels.latent_attention import triton as expanded
from bough.kernels.lora.reference import LEAST_RANK
from bough.kernels.prefill_attention.triton import PrefillConfig, config_for
from bough.kernels.projected_decode.triton import MOST_ROWS, projects
from bough.kernels.sampling.rows import MAX_VOCAB_SIZE
from bough.kernels.shared_memory import PLENTY, shared_bytes
from bough.loader.adapters import target_names
from bough.loader.locate import ModelFiles
from bough.memory.pools.kv_pool import KVPool
from bough.models.registry import runs_transformers
from bough.sampling.state import SamplingState

log = logging.getLogger(__name__)

# A captured step attends to latents themselves, because it cannot know how many keys it would make of them. In larger
# steps that takes longer than launching their kernels one by one.
MOST_ABSORBED = 1024
RING_DEPTH = 3  # steps whose pinned memory may still be in use beside one for each stage: one is being launched


def assemble(
    loaded: LoadedWeights,
    settings: Settings,
    limits: Limits,
    graphs: GraphSizes,
    weights: WeightStore | None = None,
    draft: LoadedDraft | None = None,
) -> CudaExecutor:
    """An executor with a cache of as many pages as the limits say."""
    staging = Staging(loaded.device, RING_DEPTH + limits.stages)
    shared = SharedWork(limits.rows, *_decode_shape(loaded), loaded.device) if limits.shares_reads else None
    inputs = CudaInputs(limits, loaded.device, staging, shared)
    tables, last = inputs.page_tables, inputs.last_tokens
    mixed = MixedInputs(limits, _block_queries(loaded), tables, last, staging, *media_inputs(loaded, graphs))
    slots, tokens = loaded.adapters, mixed.largest + settings.speculative.step_drafts
    check = make_check(settings.parallel.check_ranks, loaded.group, loaded.device)
    agree = loaded.group.from_first if check is None else check.tokens
    pool, drafter = build_pool(loaded, limits.pages, limits.page_size), None
    if draft is not None:
        attention = build_attention(draft.loaded, settings, limits, staging.to_device)
        drafter = draft.drafter(limits, pool, attention, staging.to_device)
    return CudaExecutor(
        loaded.model,
        pool,
        build_attention(loaded, settings, limits, staging.to_device),
        limits,
        inputs,
        mixed,
        AdapterInputs(tokens, 0 if slots is None else slots.count, loaded.device, staging),
        staging,
        SamplingState(limits.rows, limits.vocab_size, loaded.device, agree),
        graphs=graphs,
        dtype=loaded.dtype,
        weights=weights,
        group=loaded.group,
        check=check,
        drafter=drafter,
        encoder=make_encoder(loaded, staging.to_device),
        drafts=verified_drafts(loaded, settings),
        adapters=None if slots is None else AdapterStore(loaded, slots, settings.lora),
    )


def media_inputs(loaded: LoadedWeights, graphs: GraphSizes) -> tuple[int, MediaRows | None]:
    """How many positions each token of a captured step with prompts has, and the buffers of its media. Items whose
    tokens attend to each other both ways are in no graph: its kernels look back only."""
    media, config = loaded.config.media, loaded.config
    if media is None or media.whole or not graphs.mixed:
        return 1, None
    sections, shape = config.rope.sections, (1 + media.deep_layers, max(graphs.mixed), config.hidden_size)
    rows = torch.zeros(shape, dtype=loaded.dtype, device=loaded.device)
    return len(sections or (1,)), MediaRows(torch.zeros(shape[1], 1, dtype=torch.bool, device=loaded.device), rows)


def build_pool(loaded: LoadedWeights, pages: Sequence[int], page_size: int) -> KVPool:
    return KVPool(
        loaded.config, pages, page_size, loaded.cache_dtype, loaded.device, loaded.topology, loaded.cache_scales
    )


def graph_sizes(loaded: LoadedWeights, settings: Settings, shape: sizing.StepShape, forward_bytes: int) -> GraphSizes:
    """Which steps are captured, by what the settings and the back ends allow; `forward_bytes` is what the largest step
    was measured to need."""
    if settings.model.disable_cuda_graph or settings.parallel.check_ranks:  # a graph cannot wait for a comparison
        return GraphSizes()
    if runs_transformers(loaded.config):
        log.info("steps run without CUDA graphs: transformers' modules may not be captured")
        return GraphSizes()
    if settings.parallel.moe_a2a_backend != "none" or settings.parallel.groups > 1:
        log.info("steps run without CUDA graphs: how many tokens go to which rank differs (DP attention, all-to-all)")
        return GraphSizes()
    names = choose_backends(settings.model, "cuda")
    if names.decode not in CAPTURABLE:
        log.info("steps run without CUDA graphs: the %s attention back end cannot be captured", names.decode)
        return GraphSizes()
    rows = min(settings.model.cuda_graph_max_bs_decode or shape.rows, shape.rows)
    drafted = drafted_sizes(rows, verified_drafts(loaded, settings) or 0)
    verified = [width * sizes[-1] for width, sizes in drafted.items()]
    has_few = projects(loaded.dtype, loaded.cache_dtype) and loaded.config.latent is None
    has_few = has_few and not settings.model.enable_deterministic_inference
    short = {width: [size for size in sizes if size * width <= MOST_ROWS] for width, sizes in drafted.items()}
    short = {width: sizes for width, sizes in short.items() if sizes and has_few}
    decode = decode_sizes(rows)
    mixed: Sequence[int] = ()
    few_keys: Sequence[int] = ()
    if not settings.model.enable_deterministic_inference:
        if names.prefill in CAPTURABLE:
            chunk = shape.chunk_tokens
            mixed = mixed_sizes(chunk, chunk + shape.rows, loaded.config.layer_weights // loaded.topology.tp_size)
        if loaded.config.latent is not None:
            mixed = [size for size in mixed if size <= MOST_ABSORBED]
    if has_few:
        few_keys = [size for size in decode if size <= MOST_ROWS]
    shared = [size for size in decode if size > 2] if shares_reads(loaded, settings) else ()
    scratch = shape.graph_scratch_bytes([*decode, *verified], mixed, forward_bytes)
    return GraphSizes(decode, mixed, few_keys, shared, drafted, short, scratch, loaded.adapters is not None)


def verified_drafts(loaded: LoadedWeights, settings: Settings) -> int | None:
    """Drafts of a row that the device verifies by itself; 0: the host does, None: nobody makes any."""
    parallel, config = settings.parallel, loaded.config
    if settings.speculative.speculative_algorithm is None:
        return None
    # Where ranks are compared or run in lock step, the host must know each row's length.
    apart = max(parallel.pp_size, parallel.groups) > 1 or parallel.check_ranks or runs_transformers(config)
    # The steps that it verifies know nothing of adapters, of states, nor of trees.
    apart = apart or loaded.adapters is not None or config.states is not None or settings.speculative.draft_levels > 0
    able = choose_backends(settings.model, "cuda").decode in CAPTURABLE and not apart
    return settings.speculative.most_drafts if able else 0


def shares_reads(loaded: LoadedWeights, settings: Settings) -> bool:
    """Whether decodes read a prefix that they share together. Sparse attention gives each its own keys; in
    deterministic inference a row's bits may not depend on its neighbours; the tiles need plenty of shared memory."""
    sparse = loaded.config.latent is not None and loaded.config.latent.index is not None
    alike = not sparse and len(loaded.config.kv_shapes) == 1 and shared_bytes() >= PLENTY
    wanted = not (settings.model.enable_deterministic_inference or settings.scheduler.disable_tree_attention)
    return wanted and alike and choose_backends(settings.model, "cuda").decode == "triton"


def build_attention(loaded: LoadedWeights, settings: Settings, limits: Limits, to_device: ToDevice) -> AttentionBackend:
    makers = {
        "triton": lambda: _build_triton(loaded, settings, limits, to_device),
        "torch": lambda: _build_torch(to_device),
    }
    return build_backend(choose_backends(settings.model, "cuda"), makers)


def _build_torch(to_device: ToDevice) -> AttentionBackend:
    leave_out_cudnn()
    return TorchAttention(to_device)


def _build_triton(loaded: LoadedWeights, settings: Settings, limits: Limits, to_device: ToDevice) -> AttentionBackend:
    config = loaded.config
    narrowest = min(width for _, width in config.kv_shapes)
    if narrowest <= MIN_DOT // 2:  # it is rounded up to a power of two
        text = f"Triton's attention needs heads of more than {MIN_DOT // 2} columns, and this model's have {narrowest}"
        raise SettingsError(f"{text}; use --attention-backend torch.")
    latent, (heads, kv_heads, width) = config.latent, _heads(loaded)
    lines = max(limits.rows, MOST_TOKENS if verified_drafts(loaded, settings) else 0)  # that are attended for at once
    if settings.speculative.draft_levels:  # each node of a level, or each that is verified
        lines = max(lines, DRAFTED_ROWS * (settings.speculative.speculative_eagle_topk or 1), lines + STEP_DRAFTS)
    if settings.model.enable_deterministic_inference:
        shape = (heads, kv_heads, width if latent is None else latent.rank, loaded.dtype)
        configs = (invariant.config_for(*shape), invariant.config_for(*shape, prompts=True))
        return InvariantAttention(to_device, lines, *configs, loaded.device)

    def make_work(layer: AttentionSpec) -> DecodeWork:
        if latent is not None:
            return DecodeWork(lines, *_decode_shape(loaded), loaded.device, **LATENT_WORK)
        shape = (lines, heads, layer.kv_heads, layer.head_dim, loaded.device)
        return DecodeWork(*shape, window=layer.window, chunked=layer.chunked)

    prompts = None
    if latent is not None:
        short = invariant.config_for(heads, 1, latent.rank, loaded.dtype)
        prompts = LatentPrompts(to_device, expanded.config_for(loaded.dtype), short)
    return TritonAttention(to_device, make_work, _prefill_config(loaded), prompts)


def _block_queries(loaded: LoadedWeights) -> int:
    """Of the blocks of chunks in captured steps."""
    latent, heads = loaded.config.latent, loaded.topology.share(loaded.config.num_heads, "num_heads")
    if latent is None:
        return _prefill_config(loaded).block_queries
    return invariant.config_for(heads, 1, latent.rank, loaded.dtype).block_queries


def _prefill_config(loaded: LoadedWeights) -> PrefillConfig:
    return config_for(*_heads(loaded), loaded.dtype)


def _heads(loaded: LoadedWeights) -> tuple[int, int, int]:
    """Heads of this rank, key-value heads and their width. Where layers differ, tiles for these fit all of them: a step
    is cut in blocks of queries once."""
    config, topology = loaded.config, loaded.topology
    held = [topology.kv_slice_of(kv_heads) for kv_heads, _ in config.kv_shapes]
    together = math.lcm(*(own.stop - own.start for own in held))
    return topology.share(config.num_heads, "num_heads"), together, max(width for _, width in config.kv_shapes)


def _decode_shape(loaded: LoadedWeights) -> tuple[int, int, int]:
    """Heads, key-value heads and the width of values, as decodes read them: latents serve blocks of heads."""
    (heads, kv_heads, width), latent = _heads(loaded), loaded.config.latent
    return (heads, kv_heads, width) if latent is None else (heads, head_blocks(heads), latent.rank)


def attention_bytes(loaded: LoadedWeights, settings: Settings, rows: int) -> int:
    """What the torch back end, if it is used, takes for contexts longer than the profile's, what gathered latents take,
    and what the parts of shared prefixes' results do."""
    names, config, latent = choose_backends(settings.model, "cuda"), loaded.config, loaded.config.latent
    gathered = 0
    if latent is not None and not settings.model.enable_deterministic_inference:
        gathered = latent_prompts.scratch_bytes(latent, config.context_length, loaded.dtype.itemsize)
    if latent is not None and latent.index is not None:
        gathered += latent_prompts.lists_scratch_bytes(config.context_length)
    if shares_reads(loaded, settings):
        heads, _, width = _decode_shape(loaded)
        gathered += SharedWork.held_bytes(rows, heads, width)
    if "torch" not in (names.prefill, names.decode):
        return gathered
    heads = loaded.topology.share(config.num_heads, "num_heads")
    writes_scores = config.attention_softcap is not None or config.attention_sinks
    for all_kv_heads, head_dim in config.kv_shapes:
        held, width = loaded.topology.kv_slice_of(all_kv_heads), head_dim if latent is None else latent.width
        shape = (heads, held.stop - held.start, width)
        gathered += scratch_bytes(config.context_length, *shape, loaded.dtype.itemsize, writes_scores)
    return gathered


# Products are cut into tiles of up to 256 rows, which are spread over some hundred processors: those of an 8B model
# take an eighth longer for 1,600 tokens than for 1,536 (`gpu_bench_step_sizes.py`).
GPU_EVEN_TOKENS = 512
ENCODER_BYTES = 1 << 30  # for what encoders compute in one step, and for `media_inputs`; neither is measured


def build_cuda(
    loaded: LoadedWeights, files: ModelFiles, settings: Settings, makers: KernelMakers, draft: LoadedDraft | None = None
) -> LoadedModel:
    config, held, device = loaded.config, loaded.topology.held(loaded.config), loaded.device
    if config.vocab_size > MAX_VOCAB_SIZE:
        text = f"The model has {config.vocab_size} tokens; on a GPU at most {MAX_VOCAB_SIZE} can be sampled from."
        raise ModelError(text)
    if loaded.adapters is not None:  # what the cache is given later is what they leave
        loaded.adapters.reserve(settings.lora.max_lora_rank or LEAST_RANK, target_names(settings.lora))
    (free,) = loaded.group.minimum([torch.cuda.mem_get_info(device)[0]])
    rows = settings.scheduler.max_running_requests or sizing.default_rows(
        held, sizing.GPU_ROWS, int(free * sizing.GPU_FRACTION)
    )
    chunk = resolve_chunk(settings, config, sizing.default_gpu_chunk(config))
    forward_bytes = rehearse(loaded, settings, rows, chunk, makers)
    widened = settings.model.enable_deterministic_inference or config.logit_softcap is not None
    step = sizing.StepShape(
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
    shape = sizing.CacheShape.of(config, per_token, settings.memory, rows, chunk, loaded.topology)
    # What the draft model's part of the largest step takes is not measured.
    others = 0 if draft is None else sizing.STEP_WIDTHS * config.hidden_size * loaded.dtype.itemsize * (rows + chunk)
    if draft is not None:
        of_token = sum(per_token) - sum(per_token_bytes(loaded, None))
        others += of_token * draft.scratch_tokens(rows, settings.speculative.most_drafts)
    states = loaded.topology.states_of(config)
    if states is not None:  # what `StatePool.advance` keeps of drafts: inputs of a convolution, and of a recurrence
        kept = (DRAFTED_ROWS + STEP_DRAFTS) if step.drafts else 0
        others += kept * sum(states.layers) * 2 * states.channels * loaded.dtype.itemsize
    others += step.row_bytes() + attention_bytes(loaded, settings, rows)
    if loaded.topology.tp_size == 1:
        others += settings.disaggregation.device_chunks * chunk * sum(per_token)
    if config.media is not None:
        others += (settings.memory.mm_cache_size_mb << 20) + ENCODER_BYTES
    size = sizing.size_gpu_cache(
        settings.memory,
        free_bytes=free,
        total_bytes=total,
        activation_bytes=step.step_bytes(forward_bytes) + others,
        shape=shape,
        graph_bytes=sizing.LIBRARY_BYTES + graphs.scratch_bytes + graphs.count * sizing.GRAPH_BYTES,
    ).shared(loaded.group.minimum)
    own = {"late_plans": loaded.topology.pp_size == 1, "shares_reads": shares_reads(loaded, settings)}
    limits = limits_of(loaded, draft, settings, rows, chunk, shape, size, even_tokens=GPU_EVEN_TOKENS, **own)
    executor = assemble(loaded, settings, limits, graphs, WeightStore(loaded, files, settings), draft)
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
    few, many = decode_plan(0, 1, groups), decode_plan(0, MOST_ROWS + 1, groups)  # few have kernels of their own
    for plan in (prompt, few, many):
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
    staging, tokens, adapters = Staging(device, depth=1), chunk + rows, None
    attention = build_attention(loaded, settings, limits, staging.to_device)
    if loaded.adapters is not None:
        adapters = AdapterInputs(tokens, loaded.adapters.count, device, staging).send(np.ones(tokens, np.int64))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    batch = padding_batch(tokens, config.context_length, limits.page_size, device, len(pages))
    context = ForwardContext(attention, pool, batch, adapters=adapters)
    with torch.inference_mode():
        attention.prepare(batch)
        hidden = loaded.model.forward(torch.zeros_like(batch.positions), context)
        if loaded.topology.is_last:
            loaded.model.logits(hidden[:rows])
        del hidden
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
