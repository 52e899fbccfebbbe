"""A folder with config.json and safetensors is all that an engine needs, of every family that writes text: it generates
from token ids what transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import bough
from bough.core.errors import ModelError
from bough.models.registry import FAMILIES, find_family
from tests.parity import gguf_files, test_families, test_media
from tests.parity.engines import LocalEngine
from tests.parity.test_families import ENCODERS, NEW, prompt

# Of each family: its first case in test_families.py, else that of a GGUF file or of a model that reads images.
MAKERS = {
    **dict.fromkeys(test_media.CASES, test_media.make),
    **dict.fromkeys(gguf_files.FILES, gguf_files.make_checkpoint),
    **dict.fromkeys(test_families.CASES, test_families.make),
}
OTHERS = (*ENCODERS, "whisper")  # give vectors, or are given recordings
QUICK = "gpt2"


def case_of(model_type: str) -> str:
    types = find_family(model_type).model_types
    return next(name for name in sorted(MAKERS, reverse=True) if name in types)


FOLDERS = {model_type: case_of(model_type) for model_type in FAMILIES if model_type not in OTHERS}


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=pytest.mark.slow if name == QUICK else pytest.mark.long) for name in FOLDERS],
)
def test_an_engine_serves_the_folder(tmp_path: Path, model_type: str) -> None:
    name = FOLDERS[model_type]
    theirs, tokens = MAKERS[name](name, tmp_path).theirs, prompt(20, seed=6)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    with bough.Engine(model_path=str(tmp_path), skip_tokenizer_init=True, dtype="float32") as engine:
        sampling = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
        answer = engine.generate(input_ids=tokens, sampling_params=sampling)
    assert answer["output_ids"] == continued(theirs, tokens)


@torch.inference_mode()
def continued(theirs: transformers.PreTrainedModel, tokens: list[int]) -> list[int]:
    """The most likely tokens, each of a pass over all that is before it."""
    text = list(tokens)
    for _ in range(NEW):
        text.append(int(theirs(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(tokens) :]


def test_a_bias_that_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    """Answers without it would be wrong."""
    test_families.make("llama", tmp_path)
    name = "model.layers.1.mlp.down_proj.bias"
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(test_families.SIZES["hidden_size"])}, file)
    with pytest.raises(ModelError, match=rf"Tensor {name} has no place in this model.* --model-impl transformers"):
        LocalEngine(tmp_path, new=NEW, device="cpu", attention_backend="torch", max_total_tokens=100)
