"""Every multi-modal family against transformers, on tiny random checkpoints as `save_pretrained` writes them: greedy
tokens and their logprobs with two images of different sizes, with prompts in chunks, cached prefixes and a text beside
them. What an image becomes is transformers' own: here only what encoders make of it is at stake."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bough.core.media import Feature, MediaItem, MediaKind, MediaPrompt, media_ids
from bough.messages.requests import LogprobRequest
from tests.parity.engines import LocalEngine

VOCAB, NEW, TOLERANCE = 97, 5, 1e-4
IMAGE = 96  # the placeholder
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


@dataclass(frozen=True)
class Image:
    """The arrays of one image, and how many tokens stand for each of its parts, with text between them."""

    arrays: dict[str, torch.Tensor]
    spans: list[int]


@dataclass(frozen=True)
class Case:
    fields: dict[str, Any]
    images: Callable[[], list[Image]]
    options: dict[str, Any] = field(default_factory=dict)  # of transformers' forward pass
    positions: bool = False  # several for each token
    engine: dict[str, Any] = field(default_factory=dict)


def pixels(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def llava_images() -> list[Image]:
    return [Image({"pixel_values": pixels(1, 3, 16, 16, seed=seed)}, [16]) for seed in (1, 2)]


CASES: dict[str, Case] = {
    "llava": Case(
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP, "image_token_id": IMAGE},
        llava_images,
    ),
}


@dataclass
class Model:
    folder: Path
    theirs: Any
    case: Case

    def prompt(self, text: list[int], images: list[Image]) -> tuple[list[int], list[list[tuple[int, int]]]]:
        """A text with images behind its third token, and where they stand."""
        ids, spans = text[:3], []
        for number, image in enumerate(images):
            own = []
            for part in image.spans:
                own.append((len(ids), part))
                ids = [*ids, *[IMAGE] * part, 5 + number]
            spans.append(own)
        return [*ids, *text[3:]], spans

    def inputs(self, ids: list[int], images: list[Image]) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        for name in images[0].arrays if images else ():
            given[name] = torch.cat([image.arrays[name] for image in images])
        if "mm_token_type_ids" in self.case.options:
            given["mm_token_type_ids"] = (given["input_ids"] == IMAGE).int()
        if "token_type_ids" in self.case.options:
            given["token_type_ids"] = (given["input_ids"] == IMAGE).int()
        return given

    @torch.inference_mode()
    def logits(self, ids: list[int], images: list[Image]) -> torch.Tensor:
        if self.case.positions:
            self.theirs.model.rope_deltas = None
        return self.theirs(**self.inputs(ids, images), use_cache=False).logits[0]

    def continued(self, ids: list[int], images: list[Image]) -> tuple[list[int], torch.Tensor]:
        """The most likely tokens, each of a pass over all that is before it, and their logprobs."""
        tokens, scores = list(ids), []
        for _ in range(NEW):
            logprobs = self.logits(tokens, images)[-1].log_softmax(-1)
            tokens.append(int(logprobs.argmax()))
            scores.append(logprobs.max())
        return tokens[len(ids) :], torch.stack(scores)

    def media(
        self, folder: Path, ids: list[int], spans: list[list[tuple[int, int]]], images: list[Image]
    ) -> tuple[list[int], MediaPrompt]:
        """The prompt as the edge sends it."""
        tokens, items = np.array(ids, dtype=np.int32), []
        for places, image in zip(spans, images, strict=True):
            item = item_of(folder, "image", image.arrays, places)
            rows = media_ids(item.digest, item.count)
            for begin, size in places:
                tokens[begin : begin + size], rows = rows[:size], rows[size:]
            items.append(item)
        if not self.case.positions:
            return tokens.tolist(), MediaPrompt(tuple(items))
        inputs = self.inputs(ids, images)
        arrays = {name: value for name, value in inputs.items() if name.endswith("grid_thw")}
        kinds = {"mm_token_type_ids": inputs["mm_token_type_ids"]}
        positions, delta = self.theirs.model.get_rope_index(inputs["input_ids"], **kinds, **arrays)
        packed = positions[:, 0].to(torch.int32).contiguous().numpy().tobytes()
        return tokens.tolist(), MediaPrompt(tuple(items), packed, int(delta))


def item_of(folder: Path, kind: MediaKind, arrays: dict[str, torch.Tensor], spans: list[tuple[int, int]]) -> MediaItem:
    """Writes what an encoder takes to a file."""
    features, content = [], b""
    for name, value in arrays.items():
        array = value.numpy()
        features.append(Feature(name, str(array.dtype), array.shape, len(content)))
        content += array.tobytes()
    digest = hashlib.sha256(content).digest()[:16]
    path = folder / digest.hex()
    path.write_bytes(content)
    return MediaItem(kind, digest, tuple(spans), tuple(features), str(path))


def make(name: str, folder: Path) -> Model:
    case = CASES[name]
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(name, **case.fields)
    kind = transformers.AutoModelForImageTextToText
    theirs = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():  # fresh norms are one and biases zero: make every weight count
        for weight in theirs.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    theirs.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return Model(folder, theirs, case)


@pytest.fixture(scope="module", params=list(CASES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make(request.param, tmp_path_factory.mktemp(request.param))


def text(length: int, seed: int) -> list[int]:
    return torch.randint(10, IMAGE - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(model: Model, **flags: object) -> LocalEngine:
    sizes = {"max_total_tokens": 1200, "max_running_requests": 4, "cpu_threads": 1}
    return LocalEngine(model.folder, new=NEW, dtype="float32", device="cpu", **{**sizes, **model.case.engine, **flags})


@pytest.mark.slow
def test_tokens_are_those_of_transformers(model: Model, tmp_path: Path) -> None:
    engine, images = engine_of(model), model.case.images()
    cases = [(text(9, 1), images), (text(7, 2), images[::-1]), (text(12, 3), []), (text(8, 4), images[:1])]
    prompts = [model.prompt(words, shown) for words, shown in cases]
    asked = [
        model.media(tmp_path, ids, spans, shown) if shown else (ids, None)
        for (ids, spans), (_, shown) in zip(prompts, cases, strict=True)
    ]
    truth = [model.continued(ids, shown) for (ids, _), (_, shown) in zip(prompts, cases, strict=True)]
    found = engine.ask(*(ids for ids, _ in asked), media=[m for _, m in asked], logprobs=LogprobRequest())
    assert [output for output, _ in found] == [output for output, _ in truth]
    for number, (_, scores) in enumerate(truth):
        torch.testing.assert_close(torch.tensor(engine.out.scores[number]), scores, atol=TOLERANCE, rtol=TOLERANCE)
    figures = engine.scheduler._planner.media.figures
    assert figures["mm_encoded_items"] == len(images)
    # The first prompt again, with another end: all of its images come from the cache of prefixes.
    words = [*cases[0][0], 11, 12]
    ids, spans = model.prompt(words, images)
    output, cached = engine.ask(
        *[model.media(tmp_path, ids, spans, images)[0]], media=[asked_media(model, tmp_path, ids, spans, images)]
    )[0]
    assert output == model.continued(ids, images)[0] and cached >= spans[-1][-1][0] + spans[-1][-1][1]
    assert engine.scheduler._planner.media.figures["mm_encoded_items"] == len(images)


def asked_media(
    model: Model, folder: Path, ids: list[int], spans: list[list[tuple[int, int]]], images: list[Image]
) -> MediaPrompt:
    return model.media(folder, ids, spans, images)[1]
