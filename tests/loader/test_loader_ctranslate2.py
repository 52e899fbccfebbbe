"""Files of CTranslate2's: the same model as the checkpoint that they were made of, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bough.core.errors import ModelError
from bough.loader.config import read_config
from bough.loader.ctranslate2 import read_tensors
from bough.loader.load import open_source
from bough.loader.locate import locate
from tests.fakes.whisper import BEGIN_SUPPRESS, SUPPRESS, ctranslate2_tensors, tiny_whisper, write_ctranslate2


def converted(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    write_ctranslate2(folder / "model.bin", tensors)
    facts = {"suppress_ids": SUPPRESS, "suppress_ids_begin": BEGIN_SUPPRESS}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def test_a_converted_model_is_the_one_that_it_was(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    theirs = locate(str(converted(tmp_path / "converted", ctranslate2_tensors(tiny_whisper(plain)))))
    own = locate(str(plain))
    assert theirs.ctranslate2 is not None and own.ctranslate2 is None
    configs = read_config(own), read_config(theirs)
    # The format does not say these; they are those of OpenAI's vocabularies.
    assert configs[0].speech is not None and configs[1].speech is not None
    assert configs[1].speech.start == 50_257 and configs[1].speech.suppress == configs[0].speech.suppress
    for name in ("encoder", "timestamps", "begin_suppress"):
        assert getattr(configs[0].speech, name) == getattr(configs[1].speech, name)
    for name in ("num_layers", "num_heads", "hidden_size", "intermediate_size", "vocab_size", "context_length"):
        assert getattr(configs[0], name) == getattr(configs[1], name)
    first, second = open_source(own, configs[0]), open_source(theirs, configs[1])
    names = {name for name in first.names() if name != "proj_out.weight"}
    assert names <= set(second.names()) and len(names) > 80
    assert all(torch.equal(first.read(name), second.read(name)) for name in names)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: data[: len(data) // 2], "damaged or cut short"),
        (lambda data: b"PK" + data, "damaged or cut short|only Whisper is read"),
        (lambda data: data.replace(b"WhisperSpec", b"Wav2VecSpec"), "only Whisper is read"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: object, complaint: str) -> None:
    path = tmp_path / "model.bin"
    write_ctranslate2(path, {"decoder/embeddings/weight": np.ones((4, 2), np.float32)})
    assert read_tensors(path)["model.decoder.embed_tokens.weight"].tolist() == [[1.0, 1.0]] * 4
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ModelError, match=complaint):
        read_tensors(path)


def test_numbers_of_8_bits_are_refused(tmp_path: Path) -> None:
    weights = {"decoder/embeddings/weight": np.ones((4, 2), np.int8), "decoder/embeddings/weight_scale": np.ones(4)}
    write_ctranslate2(
        tmp_path / "model.bin",
        {name: each.astype(each.dtype if each.dtype == np.int8 else np.float32) for name, each in weights.items()},
    )
    with pytest.raises(ModelError, match="--quantization float16"):
        read_tensors(tmp_path / "model.bin")
