"""A draft model beside the served one: whether it fits, its configuration, and its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from bough.attention.base import AttentionBackend
from bough.attention.reading import ToDevice
from bough.core.errors import ModelError, SettingsError
from bough.core.model_config import FULL_ATTENTION, ModelConfig
from bough.core.parallel_settings import ParallelSettings
from bough.core.plan import Limits
from bough.core.settings import DRAFTED_ROWS, Settings
from bough.executor.drafter import Drafter
from bough.executor.load_model import LoadedWeights, initial_format, load_model
from bough.executor.sizing import CacheShape, CacheSize
from bough.loader.config import read_config
from bough.loader.load import open_source
from bough.loader.locate import ModelFiles, locate
from bough.loader.source import SafetensorsSource
from bough.memory.pools.kv_pool import KVPool
from bough.models.decoder import Decoder
from bough.models.draft_families import EAGLE, EAGLE3, next_token_config
from bough.models.drafts import DraftModel, SmallerModel, TargetReader
from bough.models.registry import find_family, runs_transformers

PADDING = 1024  # tokens by which vocabularies of models with one tokenizer may differ


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model that was found to fit, before its weights are read."""

    files: ModelFiles
    config: ModelConfig

    def load(self, settings: Settings, target: LoadedWeights) -> LoadedDraft:
        dtype = str(target.dtype).removeprefix("torch.")
        load_format = "dummy" if initial_format(settings) == "dummy" else "auto"
        own = replace(settings.model, model_shape=None, load_format=load_format, dtype=dtype)
        memory = replace(settings.memory, quantization_param_path=None)
        scheduler = replace(settings.scheduler, enable_return_routed_experts=False)
        settings = replace(settings, model=own, memory=memory, scheduler=scheduler)
        if self.config.moe is None:  # what is said of experts is said of the target's
            of = settings.parallel
            parallel = ParallelSettings(tp_size=of.tp_size, dp_size=of.dp_size, nnodes=of.nnodes)
            settings = replace(settings, parallel=parallel)
        try:
            loaded = load_model(self.files, settings, self.config, target.device, group=target.group)
        except (SettingsError, ModelError) as error:
            raise type(error)(f"The draft model {self.files.name}: {error}") from None
        loaded = replace(loaded, cache_dtype=target.cache_dtype, cache_scales=None)
        topk = settings.speculative.speculative_eagle_topk or 1
        if self.config.draft is None:
            return LoadedDraft(loaded, SmallerModel(loaded.model, target.config.vocab_size), topk)
        reader = cast(TargetReader, loaded.model)
        assert isinstance(target.model, Decoder)
        reader.serve(target.model)
        return LoadedDraft(loaded, cast(DraftModel, reader), topk)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    loaded: LoadedWeights
    model: DraftModel
    topk: int  # drafts for each place: more than one make trees

    def scratch_tokens(self, rows: int, levels: int) -> int:
        """What guesses for so many rows, or as many as have drafts, compute."""
        return min(rows, DRAFTED_ROWS) * self.topk * max(0, levels - 1)

    def drafter(
        self, limits: Limits, beside: KVPool, attention: AttentionBackend, to_device: ToDevice = torch.from_numpy
    ) -> Drafter:
        """With pages of its own, which move with those of the target from now on."""
        own, dtype, device = self.loaded, self.loaded.dtype, self.loaded.device
        scratch = -(-self.scratch_tokens(limits.rows, limits.draft_levels or limits.drafts) // limits.page_size)
        pages = (limits.pages[0] + scratch,)
        pool = KVPool(own.config, pages, limits.page_size, own.cache_dtype, device, own.topology)
        beside.groups[0].join(pool.groups[0])
        parts = (self.model, pool, attention, limits, own.group.from_first)
        return Drafter(*parts, target=beside, topk=self.topk, dtype=dtype, device=device, to_device=to_device)


def per_token_bytes(target: LoadedWeights, draft: LoadedDraft | None) -> tuple[int, ...]:
    """What a token costs in each group of attention: of a draft model in the first."""
    models = [target] if draft is None else [target, draft.loaded]
    first, *others = (KVPool.bytes_per_token(each.config, each.cache_dtype, each.topology) for each in models)
    return (first[0] + sum(own[0] for own in others), *first[1:])


def limits_of(
    loaded: LoadedWeights,
    draft: LoadedDraft | None,
    settings: Settings,
    rows: int,
    chunk: int,
    shape: CacheShape,
    size: CacheSize,
    **own: Any,
) -> Limits:
    """What an executor of the loaded models can do; `own` is what its device adds."""
    config, topology, page_size = loaded.config, loaded.topology, settings.memory.page_size
    return Limits(
        *(rows, page_size, size.pages, config.context_length, config.vocab_size, chunk, size.note),
        groups=config.kv_groups,
        page_bytes=shape.page_bytes(page_size),
        cache_dtype=str(loaded.cache_dtype),
        ranks=topology.tp_size,
        stages=topology.pp_size,
        in_step=topology.dp_size > 1,
        drafts=0 if draft is None else settings.speculative.most_drafts,
        adaptive_drafts=settings.speculative.speculative_adaptive,
        draft_levels=0 if draft is None else settings.speculative.draft_levels,
        media=None if settings.parallel.nnodes > 1 else loaded.media_limits,  # in files of the first host
        vectors=config.vectors,
        speech=config.speech,
        whole_prompts=not config.causal,
        **own,
    )


def find_draft(settings: Settings, files: ModelFiles, target: ModelConfig) -> Draft | None:
    """The draft model that the settings ask for, if they do; raises where it could not serve the target."""
    speculative = settings.speculative
    algorithm, path = speculative.speculative_algorithm, speculative.speculative_draft_model_path
    asked = f"--speculative-algorithm {algorithm}"
    if not speculative.has_model:
        if path is not None:
            raise SettingsError("--speculative-draft-model-path needs --speculative-algorithm STANDALONE or EAGLE3.")
        if speculative.draft_levels:
            raise SettingsError("--speculative-eagle-topk needs a draft model: drafts of NGRAM are chains.")
        if algorithm is not None and settings.parallel.pp_size > 1:
            raise SettingsError(f"{asked}: stages of a pipeline verify no drafts; leave out --pp-size.")
        if algorithm is None and (speculative.speculative_num_steps or speculative.speculative_num_draft_tokens):
            raise SettingsError("--speculative-num-steps and -num-draft-tokens need --speculative-algorithm; add it.")
        return None
    if max(settings.parallel.pp_size, settings.parallel.groups, settings.parallel.simulate_tp) > 1:
        others = "--pp-size, --enable-dp-attention and --simulate-tp"
        raise SettingsError(f"{asked} does not go with {others}; leave them out.")
    if target.states is not None and speculative.draft_levels:
        raise SettingsError("--speculative-eagle-topk: the model's recurrent layers follow chains of drafts, no trees.")
    if algorithm != "STANDALONE" and runs_transformers(target):
        raise SettingsError(f"{asked} reads hidden states of Bough's own layers, not of transformers' modules.")
    own = path in (None, settings.model.model_path)
    if algorithm == "NEXTN" or (algorithm == "EAGLE" and own):  # as SGLang has both
        if not own:
            raise SettingsError("NEXTN is in the model's own checkpoint; leave out --speculative-draft-model-path.")
        return _own_layer(files, target, asked, dummy=initial_format(settings) == "dummy")
    if path is None:
        raise SettingsError(f"{asked} needs --speculative-draft-model-path.")
    files = locate(path)
    if algorithm == "STANDALONE":
        config = read_config(files)
        if abs(config.vocab_size - target.vocab_size) > PADDING:
            text = f"{path} knows {config.vocab_size} tokens and the model {target.vocab_size}"
            raise SettingsError(f"{text}: a draft model must have the model's tokenizer.")
        if config.draft is not None:
            raise SettingsError(f"{path} is an EAGLE head; use --speculative-algorithm EAGLE or EAGLE3.")
    else:
        config = _head(files, target, algorithm == "EAGLE3")
    if config.kv_groups != (FULL_ATTENTION,):
        raise SettingsError(f"{path}: a draft model must have full attention, no windows and no recurrent layers.")
    if config.learned_positions and config.context_length < target.context_length:
        raise SettingsError(f"{path} knows {config.context_length} positions only; lower --context-length to that.")
    return Draft(files, replace(config, context_length=target.context_length))


def _head(files: ModelFiles, target: ModelConfig, third: bool) -> ModelConfig:
    names = SafetensorsSource(files.safetensors).names() if files.safetensors else ()
    if files.gguf is not None or (names and not {"fc.weight", "model.fc.weight"} & set(names)):
        text = f"{files.gguf or files.folder} is no EAGLE head: it has no fc.weight in safetensors"
        raise ModelError(f"{text}; name a head, or use --speculative-algorithm STANDALONE for a smaller model.")
    if names and third != any(".hidden_norm." in name for name in names):
        raise ModelError(f"{files.folder} is a head for --speculative-algorithm EAGLE{'' if third else 3}; use that.")
    bias = any(name.endswith("fc.bias") for name in names)
    config = read_config(files, {"architectures": [EAGLE3 if third else EAGLE], "fc_bias": bias})
    draft, layers = config.draft, target.num_layers
    assert draft is not None
    if (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        text = f"is made for a model with hidden states of {config.hidden_size} and {config.vocab_size} tokens"
        raise ModelError(f"{files.folder} {text}; this one has {target.hidden_size} and {target.vocab_size}.")
    if not third:
        return config
    taps = draft.taps or (2, layers // 2, layers - 3)
    if not all(0 <= tap < layers for tap in taps):
        raise ModelError(f"{files.folder} reads hidden states of layers that the model with {layers} has not.")
    return replace(config, draft=replace(draft, taps=taps))


def _own_layer(files: ModelFiles, target: ModelConfig, asked: str, *, dummy: bool) -> Draft:
    config = next_token_config(target)
    assert config.draft is not None
    name = f"model.layers.{config.draft.layer}.eh_proj.weight"
    if not dummy and (files.gguf is not None or name not in open_source(files, config).names()):
        name = "mtp.fc.weight" if find_family(target.architecture).further_apart else name
        text = f"{asked}: {files.name} has no layer that predicts further tokens ({name} in safetensors)"
        raise SettingsError(f"{text}; use another algorithm, or name an EAGLE head (--speculative-draft-model-path).")
    return Draft(files, config)
