"""all-MiniLM-L6-v2, the catalogue's embedding model, beside what sentence-transformers gave (make_golden_minilm.py)."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

import bough

GOLDEN = json.loads(Path(__file__).with_name("golden_minilm.json").read_text())
VECTORS = np.frombuffer(base64.b64decode(GOLDEN["vectors"]), dtype="<f4").reshape(len(GOLDEN["texts"]), -1)


@pytest.mark.slow
def test_vectors_are_those_of_sentence_transformers() -> None:
    with bough.Engine("all-MiniLM-L6-v2") as engine:
        ours = np.array([output["embedding"] for output in engine.encode(GOLDEN["texts"])])
        assert ours.shape == (4, 384) and np.abs(ours - VECTORS).max() < 1e-5
        alone = engine.encode(GOLDEN["texts"][2])["embedding"]
        assert np.abs(np.array(alone) - VECTORS[2]).max() < 1e-5
        assert not engine.get_model_info()["is_generation"]
