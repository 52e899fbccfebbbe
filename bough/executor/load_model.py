"""A model in memory, before it can run: reads its configuration with the user's changes, and loads its weights."""

import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bough.core.errors import ModelError, ResourceError, SettingsError
from bough.core.model_config import MediaConfig, ModelConfig
from bough.core.plan import Executor, HostMemory, MediaLimits
from bough.core.setting_checks import json_object
from bough.core.settings import ModelSettings, Settings
from bough.distributed.group import ALONE, RankGroup
from bough.distributed.topology import Topology
from bough.executor.machine import free_memory_bytes
from bough.kernels.ops import PackedOps
from bough.kernels.quant_linear.packed import FOR_FLOATS, Format
from bough.layers.adapters import AdapterSlots
from bough.layers.placement import SpreadExperts, SpreadOptions
from bough.loader import load
from bough.loader.config import read_config
from bough.loader.encoders import load_encoder
from bough.loader.kv_scales import Scales, checkpoint_scales, file_scales
from bough.loader.locate import ModelFiles
from bough.loader.quantization import quantization_of
from bough.loader.source import WeightSource
from bough.memory.pools.kv_pool import cache_dtype
from bough.models.base import CausalLM
from bough.models.decoder import Decoder
from bough.models.registry import build_model, runs_transformers

log = logging.getLogger(__name__)

SCALED_PRODUCTS = (9, 0)  # the compute capability from which torch multiplies 8-bit rows with a scale each


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An executor that is ready, with the model's configuration as it is run."""

    executor: Executor
    config: ModelConfig
    weight_bytes: int = 0
    load_s: float = 0.0  # that reading the weights took
    rank_weight_bytes: tuple[int, ...] = ()  # those of all ranks, if this is one of several
    host: HostMemory = ()  # for its share of cached prefixes, if it is one of several


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
    load_s: float = 0.0
    group: RankGroup = ALONE
    spread: SpreadExperts = field(default_factory=SpreadExperts)
    adapters: AdapterSlots | None = None  # None: the engine has none
    encoder: Any = None  # Transformers' module; None: prompts are text alone

    @property
    def media_limits(self) -> MediaLimits | None:
        media, config = self.config.media, self.config
        if media is None:
            plain = isinstance(self.model, Decoder) and not (config.layer_inputs or config.vectors)
            if not plain:
                return None
            return MediaLimits(0, config.hidden_size * self.dtype.itemsize, width=config.hidden_size)
        row_bytes = config.hidden_size * (1 + media.deep_layers) * self.dtype.itemsize
        return MediaLimits(min(media.placeholder, config.vocab_size - 1), row_bytes, media.whole)


def resolve_config(files: ModelFiles, settings: Settings) -> ModelConfig:
    """The model's own configuration with the user's changes."""
    overrides = json_object(settings.model.json_model_override_args, "json-model-override-args")
    config = read_config(files, overrides, settings.model.model_impl, embeds=settings.model.is_embedding)
    if config.draft is not None:
        text = f"{files.name} makes drafts for another model; give it as --speculative-draft-model-path beside that."
        raise SettingsError(text)
    _check_vectors(config, settings)
    unfit = settings.speculative.speculative_algorithm or settings.lora.enable_lora or settings.parallel.simulate_tp > 1
    plain = settings.model.quantization in ("auto", "none", *FOR_FLOATS)
    if config.speech is not None and (unfit or settings.parallel.replica_ranks > 1 or not plain):
        raise SettingsError("Speech models run on one rank, without drafts, adapters and --quantization fp8.")
    if config.media is not None and not _has_encoder(config, config.media, settings):
        config = replace(config, media=None)
    if runs_transformers(config):
        _check_fallback(settings)
    if settings.model.simulate_routing is not None:
        if config.moe is None:
            raise SettingsError(f"--simulate-routing is for models with experts, which {config.architecture} has not.")
        config = replace(config, moe=replace(config.moe, simulate="uniform"))
    asked = settings.model.context_length
    if asked is not None and asked > config.context_length:
        if config.learned_positions:
            raise SettingsError(f"--context-length {asked}: the model knows {config.context_length} positions only.")
        log.warning("--context-length %d is more than the model was made for (%d)", asked, config.context_length)
    return config if asked is None else replace(config, context_length=asked)


def _has_encoder(config: ModelConfig, media: MediaConfig, settings: Settings) -> bool:
    """Whether the model's encoders are to be loaded; raises, or tells, where they do not go with other settings."""
    if not settings.media.enable_multimodal or config.vectors is not None:
        return False
    parallel, but = settings.parallel, "this model reads text alone here (its encoders are not loaded): "
    if parallel.pp_size > 1 or parallel.nnodes > 1 or parallel.groups > 1:
        log.warning("%simages go with neither --pp-size, --nnodes nor --enable-dp-attention", but)
        return False
    if settings.speculative.has_model:
        log.warning("%sdraft models do not see images (--speculative-algorithm)", but)
        return False
    if media.whole and (settings.memory.page_size > 1 or settings.memory.kv_cache_dtype.startswith("fp8")):
        log.warning("%sattention inside an image needs --page-size 1 and a --kv-cache-dtype of 16 bits", but)
        return False
    if media.deep_layers >= config.num_layers:
        text = f"{media.architecture}: {media.deep_layers} layers are given features, of {config.num_layers}."
        raise ModelError(text)
    return True


def _check_vectors(config: ModelConfig, settings: Settings) -> None:
    """What a model that gives vectors cannot do."""
    if settings.model.is_embedding and config.vectors is None:
        raise SettingsError("--is-embedding: a GGUF file generates text here; give a folder with safetensors.")
    if config.vectors is None:
        return
    if max(settings.parallel.replica_ranks, settings.parallel.simulate_tp) > 1:
        raise SettingsError("Models that give vectors run on one rank: leave out --tp-size and --pp-size.")
    if settings.lora.enable_lora or settings.speculative.speculative_algorithm is not None:
        raise SettingsError("Models that give vectors take neither --enable-lora nor --speculative-algorithm.")
    most = settings.scheduler.max_prefill_tokens
    if not config.causal and most < config.context_length:
        text = f"An encoder computes a text in one step: raise --max-prefill-tokens ({most}) to its context"
        raise SettingsError(f"{text} of {config.context_length} tokens, or lower --context-length.")


def _check_fallback(settings: Settings) -> None:
    """What only our own layers do."""
    model = settings.model
    but = "for Bough's own layers, and this model runs through transformers' modules (--model-impl)"
    if model.quantization not in ("auto", "none"):
        raise SettingsError(f"--quantization {model.quantization} is {but}; leave it out.")
    if model.enable_deterministic_inference:
        raise SettingsError(f"--enable-deterministic-inference is {but}; leave it out.")
    if settings.lora.enable_lora:
        raise SettingsError("--enable-lora is for Bough's own layers, not for transformers' modules (--model-impl).")
    if max(settings.parallel.replica_ranks, settings.parallel.simulate_tp) > 1:
        raise SettingsError(f"--tp-size and --pp-size are {but}; leave them out.")


def load_model(
    files: ModelFiles,
    settings: Settings,
    config: ModelConfig,
    device: torch.device,
    packed_ops: PackedOps | None = None,
    group: RankGroup = ALONE,
) -> LoadedWeights:
    """Builds the model and reads its weights, or this rank's share of them, onto the device."""
    dtype = resolve_dtype(settings.model, config, device)
    topology = group.topology
    topology.layers_of(config)  # raises where the model cannot be cut
    check_experts(config, settings)
    flag = "--tp-size" if settings.parallel.simulate_tp == 1 else "--simulate-tp"
    check_split(config, topology.all_groups.tp_size, topology.ep_size, flag, topology.dp_size)
    began = time.monotonic()
    load_format = initial_format(settings)
    source = load.open_source(files, config, load_format, device)
    on_cpu, sharing = device.type == "cpu", settings.parallel.ranks_per_node
    free = free_memory_bytes() // sharing if on_cpu else torch.cuda.mem_get_info(device)[0]
    form_of = None
    if _keeps_forms(settings.model, device):
        fp8 = dtype == torch.bfloat16 and multiplies_fp8(torch.cuda.get_device_capability(device))
        form_of = load.kept_forms(source, fp8=fp8)
    parallel = settings.parallel
    options = SpreadOptions(
        parallel.ep_num_redundant_experts,
        parallel.counts_experts,
        parallel.moe_a2a_backend == "torch",
        settings.scheduler.enable_return_routed_experts,
    )
    spread = SpreadExperts(group, options)
    adapters = None
    if settings.lora.enable_lora:
        adapters = AdapterSlots(settings.lora.max_loras_per_batch, experts=topology.ep_size == 1)
    model = build_model(
        config,
        topology,
        dtype,
        device,
        group,
        quantization=settings.model.quantization,
        deterministic=settings.model.enable_deterministic_inference,
        packed_ops=packed_ops,
        form_of=form_of,
        spread=spread,
        adapters=adapters,
    )
    if options.record and not spread.layers:
        raise SettingsError("--enable-return-routed-experts is for models with experts, and this one has none.")
    slots = list(model.slots())
    load.check_share(slots, source, topology)
    if packed_ops is not None:
        weight_bytes, instead = load.packed_size(source, settings.model.quantization)[0], "--quantization int4"
    else:
        weight_bytes, instead = sum(s.nbytes for s in slots), "--dtype bfloat16"
    if on_cpu and weight_bytes > free:
        raise ResourceError(
            f"The weights need {weight_bytes / 2**30:.2f} GiB, but only {free / 2**30:.2f} GiB are free; "
            f"use a smaller model or {instead}."
        )
    cached = packed_ops is not None and load_format != "dummy"
    kept_on_disk = load.packed_cache(files, settings.model.quantization) if cached else None
    load.load_weights(slots, source, progress=True, device=device, cache=kept_on_disk)
    weight_bytes = sum(s.nbytes for s in slots)
    packed = load.packed_formats(slots)
    kept = _kept_as(packed, Counter(str(slot.form) for slot in slots if slot.form is not None), settings, dtype)
    if runs_transformers(config):
        log.warning("the model runs through transformers' modules (--model-impl), which is slower than Bough's own")
    load_s = time.monotonic() - began
    scheme = None if load_format == "dummy" else quantization_of(files)
    read = "" if scheme is None else f" ({scheme.title})"
    log.info("loaded %.2f GiB of weights%s as %s in %.1f s", weight_bytes / 2**30, read, kept, load_s)
    # Where weights are rounded to 4 or 8 bits, the cache need not have more than 16.
    cache_like = dtype if config.speech or all(form.is_float for form in packed) else torch.float16
    cache = cache_dtype(settings.memory.kv_cache_dtype, cache_like)
    scales = cache_scales(settings, source, config) if cache.itemsize == 1 else None
    encoder = None
    if config.media is not None:
        encoder = load_encoder(files, config.media, dtype, device, dummy=load_format == "dummy")
        encoder_bytes = sum(each.nbytes for each in encoder.parameters())
        weight_bytes += encoder_bytes
        log.info("loaded %.2f GiB of encoders, of Transformers' %s", encoder_bytes / 2**30, config.media.architecture)
    more = (scales, load_s, group, spread, adapters, encoder)
    return LoadedWeights(model, config, dtype, device, topology, weight_bytes, cache, *more)


def check_experts(config: ModelConfig, settings: Settings) -> None:
    """Raises if the model's experts cannot be spread as the settings say."""
    parallel = settings.parallel
    ep_size, redundant = parallel.ep_size, parallel.ep_num_redundant_experts
    if parallel.expert_distribution_recorder_mode is not None:
        flag, twice = "--expert-distribution-recorder-mode", "every group would count the tokens of all"
        if config.moe is None or runs_transformers(config):
            raise SettingsError(f"{flag}: {config.architecture} has no experts that can be counted; leave it out.")
        if parallel.groups > 1:
            raise SettingsError(f"{flag}: with --enable-dp-attention {twice}; leave one of them out.")
    if ep_size == 1:
        given = {"--enable-eplb": parallel.enable_eplb, "--ep-num-redundant-experts": redundant > 0}
        given["--moe-a2a-backend torch"] = parallel.moe_a2a_backend == "torch"
        for flag in (flag for flag, here in given.items() if here):
            raise SettingsError(f"{flag} is for experts that are spread over ranks; add --ep-size, or leave it out.")
        return
    if config.moe is None:
        raise SettingsError(f"--ep-size {ep_size}: {config.architecture} has no experts; leave it out.")
    size = max(parallel.tp_size, parallel.simulate_tp)
    if size % ep_size:
        raise SettingsError(f"--ep-size {ep_size} does not divide --tp-size {size}: experts are spread over its ranks.")
    if parallel.moe_a2a_backend == "torch" and ep_size != parallel.tp_size:
        text = f"--moe-a2a-backend torch sends tokens to whole experts; use --ep-size {parallel.tp_size}, or none."
        raise SettingsError(text)
    copied = redundant or config.moe.experts % ep_size
    if settings.model.enable_deterministic_inference and (copied or parallel.enable_eplb):
        text = "--enable-deterministic-inference: which rank computes an expert must not change the order of sums"
        others = "leave out --enable-eplb and --ep-num-redundant-experts"
        raise SettingsError(f"{text}; {others}, and use an --ep-size that divides the experts.")
    most = config.moe.experts * (ep_size - 1)  # then every rank has every expert
    if redundant > most:
        raise SettingsError(f"--ep-num-redundant-experts {redundant}: there is use for at most {most}.")


def check_split(config: ModelConfig, tp_size: int, ep_size: int = 1, flag: str = "--tp-size", groups: int = 1) -> None:
    """Raises, with the sizes that would do, if so many ranks cannot share the model."""
    why = _why_not_split(config, tp_size, ep_size, groups)
    if why is not None:
        step = math.lcm(ep_size, groups)
        multiples = range(step, config.num_heads * groups + 1, step)
        sizes = [size for size in multiples if _why_not_split(config, size, ep_size, groups) is None]
        raise SettingsError(f"{flag} {tp_size}: {why} Sizes that fit this model: {', '.join(map(str, sizes))}.")


def _why_not_split(config: ModelConfig, tp_size: int, ep_size: int, groups: int) -> str | None:
    if tp_size == 1:
        return None
    try:
        topology = Topology(0, tp_size // groups, ep_size, dp_size=groups)
        build_model(config, topology, torch.float32, torch.device("meta"))
    except (SettingsError, ModelError) as error:
        return str(error)
    return None


def _keeps_forms(settings: ModelSettings, device: torch.device) -> bool:
    """Whether weights of a quantised checkpoint stay as they are. GPUs have products for that, whose order of summing
    depends on the number of rows; the CPU's packed weights have a way of their own."""
    return device.type == "cuda" and settings.quantization != "none" and not settings.enable_deterministic_inference


def multiplies_fp8(capability: tuple[int, int]) -> bool:
    return capability >= SCALED_PRODUCTS and torch.version.hip is None


def _kept_as(packed: Counter[Format], forms: Counter[str], settings: Settings, dtype: torch.dtype) -> str:
    """In which numbers the weights are, for the log."""
    if forms:
        return ", ".join([str(dtype), *(f"{count} x {form}" for form, count in forms.items())])
    if settings.model.quantization == "fp8":
        return f"{dtype}, linear layers as fp8"
    return ", ".join(f"{count} x {form.name}" for form, count in packed.most_common()) or str(dtype)


def initial_format(settings: Settings) -> str:
    """In what format the engine's first weights are; a shape alone has random ones."""
    return settings.model.load_format if settings.model.model_shape is None else "dummy"


def cache_scales(settings: Settings, source: WeightSource, config: ModelConfig) -> Scales:
    path = settings.memory.quantization_param_path
    if path is not None:
        return file_scales(path, config.num_layers)
    return checkpoint_scales(source, config.num_layers)


def resolve_dtype(settings: ModelSettings, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The type that the model computes in."""
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
    asked, page_size = settings.scheduler.chunked_prefill_size, settings.memory.page_size
    if asked == 0:
        raise SettingsError("chunked_prefill_size must be positive, or -1 for no chunks.")
    if asked is None:
        asked = max(default, page_size)
    elif asked < 0:
        asked = config.context_length
    elif asked < page_size:
        raise SettingsError(f"chunked_prefill_size ({asked}) must be at least one page (page_size {page_size}).")
    return min(asked, max(settings.scheduler.max_prefill_tokens, page_size))
