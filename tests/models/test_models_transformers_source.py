"""What is read of Transformers' configuration classes: what the classes themselves say, in either of their forms."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import transformers

from bough.loader.config import read_config
from bough.loader.locate import locate
from bough.models import registry, transformers_family
from bough.models.registry import FAMILIES, find_family
from bough.models.transformers_family import usual_fields

ASSIGNED = """
class TinyConfig(PreTrainedConfig):
    model_type = "tiny"
    hidden_act: str = "relu"
    num_key_value_heads: int | None = None
    ends: tuple[int, ...] = (3, 4)
    context: int = 4 * 1024
    default_theta = 5e5
"""
CONSTRUCTED = """
class TinyConfig(PreTrainedConfig):
    model_type = "tiny"
    default_theta = 5e5

    def __init__(self, vocab=None, hidden_act="relu", ends=(3, 4), context=4 * 1024, **kwargs):
        super().__init__(**kwargs)
"""


@pytest.mark.parametrize("source", [ASSIGNED, CONSTRUCTED])
def test_constants_are_read_and_what_is_computed_is_not(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(transformers_family, "transformers_source", lambda path: source)
    assert usual_fields("tiny") == {"hidden_act": "relu", "ends": [3, 4], "rope_theta": 5e5}


def test_of_a_multimodal_model_it_is_the_language_models_class(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ASSIGNED.replace('"tiny"', '"tiny_text"')
    outer = 'class WholeConfig(PreTrainedConfig):\n    model_type = "tiny"\n    hidden_act: str = "gelu"\n'
    monkeypatch.setattr(transformers_family, "transformers_source", lambda path: text + outer)
    assert usual_fields("tiny")["hidden_act"] == "relu"


def test_a_model_that_transformers_do_not_have_has_none() -> None:
    assert usual_fields("nobodys") == {}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families_assume_what_the_class_does(model_type: str) -> None:
    """Of what is read there, the class itself says the same; so a release that writes its classes otherwise shows."""
    classes = transformers.CONFIG_MAPPING
    config = classes[f"{model_type}_text" if f"{model_type}_text" in classes else model_type]
    stated = {field.name: field.default for field in dataclasses.fields(config)}
    read = {name: value for name, value in usual_fields(model_type).items() if name in stated}
    assert read
    for name, value in read.items():
        assert (tuple(value) if isinstance(stated[name], tuple) else value) == stated[name], name


LISTED = """
    MODEL_FOR_PRETRAINING_MAPPING_NAMES = OrderedDict([("tiny", "TinyForConditionalGeneration")])
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict([("tiny_text", "TinyForCausalLM"), ("old", "OldLMHeadModel")])
    MODEL_FOR_MASKED_LM_MAPPING_NAMES = OrderedDict([("tiny", "TinyForMaskedLM")])
"""


def test_classes_that_write_text_are_those_that_transformers_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_family, "transformers_source", lambda path: LISTED)
    text = [("tiny_text", "TinyForCausalLM"), ("old", "OldLMHeadModel")]
    assert transformers_family.writers() == [*text, ("tiny", "TinyForConditionalGeneration")]


@pytest.mark.parametrize(
    ("model_type", "architectures"),
    [
        ("llama", ("LlamaForCausalLM",)),
        ("gpt2", ("GPT2LMHeadModel",)),
        ("gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")),
        ("llama4", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")),
        ("smolvlm", ("SmolVLMForConditionalGeneration",)),
        ("whisper", ("WhisperForConditionalGeneration",)),  # stated: its decoder alone is listed, too
    ],
)
def test_a_family_has_the_names_that_transformers_list(model_type: str, architectures: tuple[str, ...]) -> None:
    assert find_family(model_type).architectures == architectures
    assert all(hasattr(transformers, name) for name in architectures)


def test_files_of_llama_cpp_are_of_language_models() -> None:
    assert find_family("gemma3").gguf_architecture == "gemma3" and not find_family("glm4v").gguf_architecture


def test_sizes_must_be_stated_but_in_a_text_config() -> None:
    assert "hidden_size" not in find_family("llama").defaults
    assert "n_embd" not in find_family("gpt2").defaults
    assert find_family("gemma3").defaults["hidden_size"] == 2304


def test_the_package_is_found_without_being_imported() -> None:
    assert Path(transformers.__file__).parent.joinpath("models/llama").is_dir()
    assert "class LlamaConfig" in transformers_family.transformers_source("models/llama/configuration_llama.py")
    assert transformers_family.transformers_source("models/nobodys.py") == ""


def test_published_files_of_gpt_oss_need_no_recent_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not say with what their experts' gates are multiplied, which older configuration classes lack as well."""
    monkeypatch.setattr(registry, "usual_fields", lambda model_type: {})
    monkeypatch.setattr(registry, "_built_in", registry._built_in.__wrapped__)
    published = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880, "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 2, "num_key_value_heads": 8,
        "num_local_experts": 32, "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                         "rope_type": "yarn", "truncate": False},
        "tie_word_embeddings": False, "vocab_size": 201088,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = read_config(locate(str(tmp_path), load_format="dummy"), {})
    assert config.moe is not None and config.moe.clamped_gate == (1.702, 7.0)
