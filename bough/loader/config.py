"""Reads a checkpoint's own configuration as a `ModelConfig`, and its generation settings as sampling defaults.

Finds the model's family and lays the user's overrides over the file and the family's defaults under it; what the fields
mean is the family's business (`bough.models`). GGUF metadata first take the form of a config.json (`gguf_config`), so
overrides and checks hold for both.
"""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from bough.core.errors import ModelError, damage_named
from bough.core.model_config import ModelConfig
from bough.loader.locate import PARAMS_NAME, ModelFiles
from bough.loader.quantization import quantization_of
from bough.loader.vectors import generating_name, read_vectors
from bough.models.family import ModelFamily
from bough.models.fields import Fields, read_json
from bough.models.registry import FALLBACK, find_family, runs_transformers, supported_architectures

# What Mistral's params.json does not say, such as what it means where it has no window.
PARAMS_DEFAULTS = {"sliding_window": None, "max_position_embeddings": 32_768, "rope_theta": 10_000.0}
SPEECH_FIELDS = ("suppress_tokens", "begin_suppress_tokens", "alignment_heads")
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_config(
    files: ModelFiles, overrides: Mapping[str, Any] | None = None, impl: str = "auto", *, embeds: bool = False
) -> ModelConfig:
    """The model's shape. `overrides` are fields of config.json (`--json-model-override-args`) that replace its own;
    `impl` is `--model-impl`, `embeds` is `--is-embedding`."""
    with damage_named(files.gguf or files.config or files.folder):
        return _read_config(files, overrides, impl, embeds)


def _read_config(files: ModelFiles, overrides: Mapping[str, Any] | None, impl: str, embeds: bool) -> ModelConfig:
    if files.gguf is not None:
        if impl == "transformers":
            raise ModelError(f"{files.gguf}: --model-impl transformers reads safetensors only; leave it out.")
        from bough.loader.gguf_config import read_gguf_config  # the gguf package takes a moment to load

        given, freq_factors = read_gguf_config(files.gguf)
        config = _build(str(files.gguf), given, overrides or {}, _generation_eos(files))
        # llama.cpp adds the one to norm weights that are stored without it, and stores the result of some rope
        # scalings. Another scaling can only come from the overrides, and takes that one's place.
        rope = replace(config.rope, factors=freq_factors) if config.rope.kind == "default" else config.rope
        return replace(config, norm_plus_one=False, rope=rope)
    if files.ctranslate2 is not None:
        from bough.loader.ctranslate2 import config_of  # needs numpy

        return _build(str(files.ctranslate2), config_of(files.ctranslate2), overrides or {}, ())
    if files.config is None:
        raise ModelError(f"{files.folder} has no config.json, so the model's shape is unknown.")
    quantization_of(files)  # raises what cannot be read
    stated = _stated(files.config)
    if files.generation_config is not None:  # newer checkpoints say there what must not be written
        stated |= {name: ids for name, ids in read_json(files.generation_config).items() if name in SPEECH_FIELDS}
    config = _build(str(files.config), stated, overrides or {}, _generation_eos(files), impl)
    fields = Fields(str(files.config), {**find_family(config.architecture).defaults, **stated, **(overrides or {})})
    vectors = read_vectors(files.folder, fields, encoder=not config.causal, asked=embeds)
    if vectors is not None and runs_transformers(config):
        raise ModelError(f"{files.config}: vectors come from Bough's own layers only; leave out --model-impl.")
    if vectors is not None:
        vectors = msgspec.structs.replace(vectors, size=config.hidden_size)
    longest = files.folder / "sentence_bert_config.json"
    if vectors is None or not longest.is_file():
        return replace(config, vectors=vectors)
    limit = Fields(str(longest), read_json(longest)).integer("max_seq_length", config.context_length)
    return replace(config, vectors=vectors, context_length=min(limit, config.context_length))


def check_config(
    files: ModelFiles, overrides: Mapping[str, Any], impl: str, *, embeds: bool = False
) -> ModelConfig | None:
    """`read_config`, but without torch: None of a model that only `transformers` knows."""
    if files.config is None or _family(str(files.config), {**_stated(files.config), **overrides}, impl) != FALLBACK:
        return read_config(files, overrides, impl, embeds=embeds)
    return None


def _stated(path: Path) -> dict[str, Any]:
    given = read_json(path)
    if path.name != PARAMS_NAME:
        return given
    architecture = "MixtralForCausalLM" if given.get("moe") else "MistralForCausalLM"
    return {**PARAMS_DEFAULTS, "architectures": [architecture], **given}


def read_sampling_defaults(files: ModelFiles) -> dict[str, float | int]:
    """The sampling parameters that the model's makers recommend, by SGLang's names; empty when they name none."""
    if files.generation_config is None:
        return {}
    given = read_json(files.generation_config)
    defaults: dict[str, float | int] = {}
    for name in SAMPLING_FIELDS:
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{files.generation_config}: {name} must be a number, got {value!r}.")
        defaults[name] = value
    if defaults.get("top_k") == 0:  # Transformers' way to say "off"
        defaults["top_k"] = -1
    return defaults


def _generation_eos(files: ModelFiles) -> tuple[int, ...]:
    path = files.generation_config
    return () if path is None else Fields(str(path), read_json(path)).token_ids("eos_token_id")


def _build(
    where: str, given: Mapping[str, Any], overrides: Mapping[str, Any], more_eos: tuple[int, ...], impl: str = "auto"
) -> ModelConfig:
    family = _family(where, {**given, **overrides}, impl)
    text = Fields(where, given).section("text_config")  # a multimodal checkpoint keeps its language model there
    # Whether its embeddings are tied is said outside, if anywhere.
    tied = {"tie_word_embeddings": given["tie_word_embeddings"]} if "tie_word_embeddings" in given else {}
    layers: list[Mapping[str, Any]] = [overrides, tied, text.values if text else {}, given, family.defaults]
    fields = Fields(where, ChainMap(*map(dict, layers)))
    both_ways = fields.values.get("use_bidirectional_attention")  # Gemma 4 says for which tokens; text has no images
    if both_ways != "vision" and (both_ways == "all" or fields.boolean("use_bidirectional_attention")):
        raise ModelError(f"{where}: attends in both directions, so it is an encoder and cannot generate text.")
    config = family.read_config(fields)
    outer_eos = Fields(where, given).token_ids("eos_token_id") if "eos_token_id" not in overrides else ()
    config = replace(config, media=family.read_media(Fields(where, {**given, **overrides})))
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *outer_eos, *more_eos))))


def _family(where: str, names: Mapping[str, Any], impl: str) -> ModelFamily:
    named = names.get("architectures") or [names.get("model_type")]
    name = str(named[0]) if isinstance(named, list) else str(named)
    if name not in supported_architectures() and generating_name(name) in supported_architectures():
        name = generating_name(name)
    return find_family(name, f"{where}: ", impl)
