"""Whisper through scheduler and executor beside Transformers, on a tiny random model: logprobs within 1e-4, the same
tokens by Transformers' own rules for what may be written, several recordings at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.generation import GenerateEncoderDecoderOutput
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from bough.core.media import Feature, MediaItem, MediaPrompt
from bough.core.pooling import Pooling
from bough.kernels.quant_linear.packed import Format
from bough.messages.requests import LogprobRequest
from bough.speech.words import first_positions
from tests.fakes.boxes import generate
from tests.fakes.native import needs_kernels
from tests.fakes.whisper import (
    BEGIN_SUPPRESS,
    END,
    POSITIONS,
    START,
    SUPPRESS,
    VOCABULARY,
    random_features,
    tiny_whisper,
)
from tests.parity.engines import LocalEngine

WITHOUT_TIMES = VOCABULARY - POSITIONS - 2
NEW = 24


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[transformers.WhisperForConditionalGeneration, Path]:
    folder = tmp_path_factory.mktemp("whisper")
    return tiny_whisper(folder), folder


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(theirs: tuple[object, Path], request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    device = {"device": request.param, "dtype": "float32", "max_total_tokens": 2048}  # others test beside it
    yield LocalEngine(theirs[1], new=NEW, context_length=64, attention_backend="torch", **device)


def recording(seed: int, folder: Path) -> MediaPrompt:
    features = random_features(seed)
    file = folder / f"features-{seed}"
    features.tofile(file)
    feature = Feature("input_features", "<f4", features.shape, 0)
    return MediaPrompt((MediaItem("audio", seed.to_bytes(16, "big"), (), (feature,), str(file)),))


@torch.no_grad()
def written_by_theirs(
    model: transformers.WhisperForConditionalGeneration, seed: int, prompt: list[int]
) -> tuple[list[int], list[float]]:
    """Greedy tokens, and what the model itself gives each, without rules."""
    features, timed = torch.from_numpy(random_features(seed))[None], prompt[-1] != WITHOUT_TIMES
    config = transformers.GenerationConfig(
        eos_token_id=END, bos_token_id=END, no_timestamps_token_id=WITHOUT_TIMES, max_initial_timestamp_index=50
    )
    rules = [
        SuppressTokensAtBeginLogitsProcessor(BEGIN_SUPPRESS, len(prompt), device="cpu"),
        SuppressTokensLogitsProcessor(SUPPRESS, device="cpu"),
    ]
    if timed:
        rules.append(WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt)))
    else:
        rules.append(SuppressTokensLogitsProcessor(list(range(WITHOUT_TIMES, VOCABULARY)), device="cpu"))
    ids, scores = torch.tensor([prompt]), []
    while ids.shape[1] < len(prompt) + NEW and (ids.shape[1] == len(prompt) or int(ids[0, -1]) != END):
        logits = model(input_features=features, decoder_input_ids=ids).logits[:, -1]
        ruled = logits
        for rule in rules:
            ruled = rule(ids, ruled)
        best = ruled.argmax(-1, keepdim=True)
        scores.append(float(logits.log_softmax(-1)[0, best[0, 0]]))
        ids = torch.cat([ids, best], dim=1)
    return ids[0, len(prompt) :].tolist(), scores


def test_texts_and_logprobs_are_theirs_with_several_recordings_at_once(
    theirs: tuple[transformers.WhisperForConditionalGeneration, Path], engine: LocalEngine, tmp_path: Path
) -> None:
    model = theirs[0]
    asked = [(seed, prompt) for seed in range(4) for prompt in ([START], [5, START], [START, WITHOUT_TIMES])]
    for handle, (seed, prompt) in enumerate(asked):
        media, wanted = recording(seed, tmp_path), LogprobRequest(start=0)
        given = {"max_new_tokens": NEW, "temperature": 0.0, "namespace": str(seed), "stop_token_ids": (END,)}
        engine.inbox.pending.append(generate(handle, prompt, media=media, logprobs=wanted, **given))
    while not all(handle in engine.out.ended for handle in range(len(asked))):
        engine.scheduler.turn()
        assert not engine.scheduler._batch.audit().problems
    ours = [engine.out.outputs[handle] for handle in range(len(asked))]
    expected = [written_by_theirs(model, *each) for each in asked]
    assert ours == [tokens for tokens, _ in expected]
    assert len({tuple(tokens) for tokens in ours}) > len(asked) // 2, "the recordings make a difference"
    for handle, (tokens, scores) in enumerate(expected):
        assert engine.out.scored[handle] == tokens
        assert np.abs(np.array(engine.out.scores[handle]) - np.array(scores)).max() < 1e-4


@needs_kernels
def test_weights_of_8_bits_give_nearly_the_same(
    theirs: tuple[transformers.WhisperForConditionalGeneration, Path], tmp_path: Path
) -> None:
    """Encoder and decoder with native products: the scores of the tokens that Transformers has written."""
    model, folder = theirs
    engine = LocalEngine(folder, new=NEW, context_length=64, quantization="int8")
    packed = [slot.packing.weight.format for slot in engine.executor._inner._model.slots() if slot.packing is not None]  # type: ignore[attr-defined]
    assert Format.Q8 in packed
    for seed in range(3):
        written, scores = written_by_theirs(model, seed, [START])
        wanted, media = LogprobRequest(start=0), recording(seed, tmp_path)
        given = {"max_new_tokens": 1, "temperature": 0.0, "namespace": str(seed), "ignore_eos": True}
        engine.inbox.pending.append(generate(seed, [START, *written], media=media, logprobs=wanted, **given))
        while seed not in engine.out.ended:
            engine.scheduler.turn()
        run = engine.out.started[seed].input_logprobs
        assert run is not None
        ours = np.frombuffer(run.logprobs, np.float32)
        assert len(ours) == len(scores) and np.abs(ours - np.array(scores)).max() < 0.25
        assert np.corrcoef(ours, scores)[0, 1] > 0.99


@pytest.mark.parametrize("stated", [None, [[0, 1], [2, 0]]])
def test_tokens_are_where_transformers_finds_them(
    theirs: tuple[transformers.WhisperForConditionalGeneration, Path], stated: list[list[int]] | None, tmp_path: Path
) -> None:
    """In chunks of 16 tokens, several at once, by the heads that the checkpoint names or the upper half's."""
    model, folder = theirs
    if stated is not None:
        config = json.loads((folder / "generation_config.json").read_text()) | {"alignment_heads": stated}
        folder = tmp_path / "stated"
        shutil.copytree(theirs[1], folder)
        (folder / "generation_config.json").write_text(json.dumps(config))
    engine = LocalEngine(folder, new=NEW, context_length=64, attention_backend="torch")
    heads = stated or [[layer, head] for layer in (1, 2) for head in (0, 1)]
    asked = [
        (seed, prompt, written_by_theirs(model, seed, prompt)[0], frames)
        for seed, prompt, frames in ((0, [START], 60), (1, [5, 6, START], 41), (2, [START], 33))
    ]
    for handle, (seed, prompt, written, frames) in enumerate(asked):
        wanted = Pooling("align", dimensions=frames // 2, second=len(prompt))
        given = {"media": recording(seed, tmp_path), "pooling": wanted, "namespace": str(seed), "max_new_tokens": 0}
        engine.inbox.pending.append(generate(handle, prompt + written, **given))
    while not all(handle in engine.out.ended for handle in range(len(asked))):
        engine.scheduler.turn()
    model.set_attn_implementation("eager")
    places: set[float] = set()
    for handle, (seed, prompt, written, frames) in enumerate(asked):
        ids, features = torch.tensor([prompt + written]), torch.from_numpy(random_features(seed))[None]
        with torch.no_grad():
            read = model(input_features=features, decoder_input_ids=ids, output_attentions=True)
        outputs = GenerateEncoderDecoderOutput(sequences=ids, cross_attentions=(read.cross_attentions,))
        expected = model._extract_token_timestamps(outputs, heads, num_frames=frames, num_input_ids=len(prompt))[0]
        attended = np.frombuffer(engine.out.vectors[handle], np.float32).reshape(-1, frames // 2)
        ours = first_positions(attended) * 0.02
        assert ours == pytest.approx(expected[len(prompt) : -1].numpy())
        places.update(ours.tolist())
    assert len(places) > 4, "they are not all at the beginning or the end"


def test_a_request_without_a_recording_is_refused(engine: LocalEngine) -> None:
    engine.inbox.pending.append(generate(0, [START], max_new_tokens=4))
    while 0 not in engine.out.ended:
        engine.scheduler.turn()
    assert "/v1/audio/transcriptions" in str(engine.out.ended[0])


def test_a_client_that_has_left_takes_its_recording_along(engine: LocalEngine, tmp_path: Path) -> None:
    """The row ends all the same, and what it heard is nobody else's."""
    media = recording(0, tmp_path)
    (tmp_path / "features-0").unlink()
    given = {"max_new_tokens": 3, "temperature": 0.0, "namespace": "0", "ignore_eos": True}
    engine.inbox.pending.append(generate(0, [START], media=media, **given))
    while 0 not in engine.out.ended:
        engine.scheduler.turn()
    engine.inbox.pending.append(generate(1, [START], media=recording(0, tmp_path), logprobs=LogprobRequest(), **given))
    while 1 not in engine.out.ended:
        engine.scheduler.turn()
    assert engine.out.outputs[1] and engine.executor._inner._hearing._heard[0][0] == media.items[0].digest  # type: ignore[attr-defined]
