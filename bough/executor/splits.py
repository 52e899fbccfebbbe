"""How a model could be split over GPUs that need not be here, and what each split would give: memory from the model's
configuration, as an engine counts it, and time from `bough.distributed.cost_model`."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import msgspec
import torch

from bough.core.errors import ModelError, ResourceError, SettingsError
from bough.core.model_config import ModelConfig
from bough.core.settings import Settings
from bough.distributed.cost_model import ACTIVATION_BYTES, Cluster, Load, ModelShare, Split, step_cost
from bough.distributed.topology import Topology
from bough.executor import sizing
from bough.executor.load_model import resolve_chunk
from bough.loader.locate import ModelFiles
from bough.loader.quantization import quantization_of
from bough.memory.pools.kv_pool import KVPool, cache_dtype
from bough.models.registry import build_model

BATCHES = (1, 64, 256)  # requests in flight for the GPUs of each host; the first over all hosts
MOST_RANKS = 64  # of a tensor parallel group
ALIKE = 0.97  # of the best rate: the simplest split of those that reach it is recommended


class Pace(msgspec.Struct, frozen=True):
    requests: int  # in flight over all GPUs; fewer than asked for if their tokens do not fit
    step_ms: float
    steps_per_s: float
    tokens_per_s: float  # of all replicas
    parts_ms: dict[str, float]


class Outlook(msgspec.Struct, frozen=True):
    """A split that fits. Bytes are those of the fullest GPU, tokens those of all replicas together."""

    split: Split
    servers: int
    flags: str  # of each server
    weight_bytes: int
    kv_bytes: int
    kv_tokens: int
    prompt_tokens_per_s: float
    paces: tuple[Pace, ...]


# Bytes of a number of the layers, by the titles of formats that are kept; what else is quantised becomes 16-bit floats.
KEPT = {
    "cuda": ((r"FP8( in blocks of \d+ x 128)?$|float8$", 1.0), (r"^MXFP4|with 4 bits$|int4$", 0.5)),
    "cpu": ((r"(with 4 bits|int4)$", 0.625), (r"(?i)(with 8 bits|int8)$", 1.0625)),
}


def weight_bytes_of(files: ModelFiles, settings: Settings, device: str = "cuda", fp8: bool = True) -> float:
    """Of a number of the layers; without `fp8` the device has no products of 8-bit floats."""
    asked, stored = settings.model.quantization, quantization_of(files)
    if asked not in ("auto", "none"):
        return 0.5 if asked == "int4" else 1.0
    title = stored.title if stored is not None and asked == "auto" else ""
    return next((size for pattern, size in KEPT[device] if re.search(pattern, title) and (fp8 or size != 1.0)), 2.0)


def outlooks(
    config: ModelConfig, settings: Settings, cluster: Cluster, weight_bytes: float, context: int
) -> list[Outlook]:
    """All splits that fit, the fastest first; before them the one to take, the simplest of those nearly as fast."""
    found = [_outlook(config, settings, cluster, weight_bytes, context, split) for split in _splits(config, cluster)]
    fit = sorted((each for each in found if each is not None), key=_worth, reverse=True)
    near = [each for each in fit if _worth(each) >= ALIKE * _worth(fit[0])]
    near.sort(key=lambda each: (each.split.tp * each.split.pp, each.split.pp, each.split.groups == 1, -each.kv_tokens))
    return near[:1] + [each for each in fit if each is not near[0]]


def _worth(each: Outlook) -> float:
    """Tokens per second at the largest batch, of requests that are half prompt and half answer."""
    return 2.0 / (1.0 / each.prompt_tokens_per_s + 1.0 / each.paces[-1].tokens_per_s)


def _splits(config: ModelConfig, cluster: Cluster) -> Iterator[Split]:
    """Those that use all GPUs, whose replicas and tensor parallel groups fill hosts or divide them, and that an engine
    starts with."""
    total, moe = cluster.per_host * cluster.hosts, config.moe
    most_stages = 1 + sum(map(config.stands_alone, range(1, config.num_layers)))
    sizes = [n for n in range(1, total + 1) if total % n == 0 and (n % cluster.per_host) * (cluster.per_host % n) == 0]
    for tp in (size for size in sizes if size <= min(config.num_heads, MOST_RANKS)):
        try:
            _numbers(config, tp)
        except (SettingsError, ModelError):
            continue  # so many cannot share the model
        for pp in [size // tp for size in sizes if size % tp == 0 and size // tp <= most_stages]:
            for ep in {1, tp} if moe is not None and moe.experts % tp == 0 else {1}:
                groupable = (config.latent is not None or moe is not None) and pp == 1
                for groups in sizes if groupable else (1,):
                    if tp % groups == 0 and (groups == 1 or groups * cluster.per_host % tp == 0):  # each on one host
                        yield Split(tp, pp, total // (tp * pp), ep, groups)


def _outlook(
    config: ModelConfig, settings: Settings, cluster: Cluster, weight_bytes: float, context: int, split: Split
) -> Outlook | None:
    """None: the weights do not fit, or no request does beside them."""
    cache_type = cache_dtype(settings.memory.kv_cache_dtype, torch.bfloat16)
    share = share_of(config, weight_bytes, cache_type, split.tp, split.groups)
    stages, memory = share.stages(split.pp), int(cluster.gpu.memory_gib * 2**30)
    weights = int(max(stage.nbytes for stage in stages))
    free, chunk = max(0, memory - weights), resolve_chunk(settings, config, sizing.default_gpu_chunk(config))
    of_groups = KVPool.bytes_per_token(config, cache_type, Topology(0, split.tp // split.groups))
    of_stage = tuple(-(-each * len(stages[0].layers) // config.num_layers) for each in of_groups)
    fitting = sizing.default_rows(config, sizing.GPU_ROWS, int(free * sizing.GPU_FRACTION))
    rows = settings.scheduler.max_running_requests or fitting
    shape = sizing.CacheShape.of(config, of_stage, settings.memory, rows, chunk)
    step = sizing.STEP_WIDTHS * (rows + chunk) * config.hidden_size * ACTIVATION_BYTES
    try:
        size = sizing.size_gpu_cache(
            settings.memory, free_bytes=free, total_bytes=memory, activation_bytes=step, shape=shape
        )
    except ResourceError:
        return None
    tokens = size.pages[0] * settings.memory.page_size
    if tokens < context:
        return None
    paces = []
    for requests in (BATCHES[0], *(each * cluster.hosts for each in BATCHES[1:])):
        each = min(min(rows, tokens // context) * split.groups, -(-requests // split.replicas))
        cost = step_cost(share, cluster, split, Load(each, context))
        seconds, busy = sum(cost.values()), each * min(split.replicas, requests)
        parts = {part: 1e3 * taken for part, taken in cost.items()}
        paces.append(Pace(busy, 1e3 * seconds, 1.0 / seconds, busy / seconds, parts))
    prompts = step_cost(share, cluster, split, Load(prompt=chunk, prompt_context=context / 2))
    rate, every = split.replicas * split.pp * chunk / sum(prompts.values()), tokens * split.groups * split.replicas
    return Outlook(split, *split.servers(cluster), weights, shape.nbytes(tokens), every, rate, tuple(paces))


@cache
def _numbers(config: ModelConfig, tp: int) -> Counter[tuple[int, str]]:
    """The numbers that a rank of so many holds, by layer and part; -1 is outside of layers."""
    found: Counter[tuple[int, str]] = Counter()
    for slot in build_model(config, Topology(0, tp), torch.bfloat16, torch.device("meta")).slots():
        name, layer = slot.name, re.match(r"model\.layers\.(\d+)\.", slot.name)
        if layer is not None:
            part = "experts" if ".experts." in name else "attention" if ".self_attn." in name else "dense"
            found[int(layer[1]), part] += slot.target.numel()
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            found[-1, "head" if "lm_head" in name else "embedding"] += slot.target.numel()
    return found


def share_of(
    config: ModelConfig, weight_bytes: float, cache_type: torch.dtype, tp: int = 1, groups: int = 1
) -> ModelShare:
    """What a rank holds if attention runs in so many groups of the `tp` ranks."""
    whole, attention = _numbers(config, tp), _numbers(config, tp // groups)
    layers = range(config.num_layers)
    of_groups = KVPool.bytes_per_token(config, cache_type, Topology(0, tp // groups))
    heads = config.num_heads * groups / tp * sum(map(config.attends, layers))
    latent, moe = config.latent, config.moe
    decode = prefill = 4.0 * config.head_dim
    if latent is not None:  # decodes compare with latents, prompts with the keys that these stand for
        decode = 4.0 * latent.rank + 2.0 * latent.rope_dim
        prefill = 2.0 * (latent.nope_dim + latent.rope_dim + latent.value_dim)
    stored = tuple((attention[n, "attention"], whole[n, "dense"], whole[n, "experts"]) for n in layers)
    ends = whole[-1, "embedding"], whole[-1, "head"] or whole[-1, "embedding"], config.tied_embeddings
    costs = sum(of_groups), decode * heads, prefill * heads
    window = config.sliding_window or 0, sum(of_groups[1:]) / max(1, sum(of_groups))
    experts = (1, 1) if moe is None else (moe.experts, moe.per_token)
    widths = config.hidden_size, config.vocab_size
    return ModelShare(stored, *ends, *widths, *costs, *window, latent is not None, *experts, weight_bytes)
