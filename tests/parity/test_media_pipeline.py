"""From the bytes of images to tokens: what Bough's worker, scheduler and executor make of a prompt, beside
Transformers' processor and `generate` of the same checkpoint."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers

from bough.multimodal.expansion import expand
from bough.multimodal.preparer import KINDS
from bough.tokenizer.load import load_tokenizer
from tests.multimodal.checkpoints import HEARING, LANGUAGE, SPECS, write_model
from tests.multimodal.test_multimodal_families import WATCHING, as_png, picture, prepare, worker_of
from tests.parity.engines import LocalEngine
from tests.parity.test_media import CASES, CLIPS

NEW = 6


def test_the_page_says_what_is_compared() -> None:
    page = (Path(__file__).parents[2] / "docs/multimodal.md").read_text().partition("## Checked against")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    told = {row[0].strip("`"): [cell != "–" for cell in row[1:]] for row in rows}
    watching = {name for name, kinds in KINDS.items() if "video" in kinds}
    first, second = ({*each, *HEARING} for each in (SPECS, LANGUAGE))
    compared = (first, second, CASES, watching & CLIPS.keys() & set(WATCHING), CASES)  # on an H200, too
    assert told == {name: [name in each for each in compared] for name in KINDS}
    assert watching == set(WATCHING), "each that takes clips is compared"


@pytest.mark.slow
@pytest.mark.parametrize("family", SPECS)
def test_bytes_of_images_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    processor, model = write_model(tmp_path, family)
    worker, tokenizer = worker_of(tmp_path), load_tokenizer(tmp_path)
    # Tokens that see each other both ways are computed together.
    page = {"page_size": 1, "chunked_prefill_size": 128} if family.startswith("gemma") else {}
    sizes = {"max_total_tokens": 4096, "cpu_threads": 1, "device": "cpu", "context_length": 2048, **page}
    engine = LocalEngine(tmp_path, new=NEW, dtype="float32", **sizes)
    prompts = []
    for count in (1, 2):
        images = [picture(*size, seed) for seed, size in enumerate([(40, 60), (90, 33)][:count])]
        place = SPECS[family].place
        text = "user\n" + "\n".join(place for _ in images) + "\nWhat is this?"
        nested = family in ("gemma3", "gemma4", "idefics3", "smolvlm") or (family == "llava_onevision" and count > 1)
        given = processor(text=text, images=[images] if nested else images, return_tensors="np")
        tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in given.items()}
        with torch.inference_mode():
            theirs = model.generate(**tensors, max_new_tokens=NEW, do_sample=False)[0, tensors["input_ids"].shape[1] :]
        folder = tmp_path / str(count)
        folder.mkdir()
        items = prepare(worker, folder, [as_png(image) for image in images])
        ids, media = expand(np.array(tokenizer.encode(text), dtype=np.int32), items, tokenizer)
        prompts.append((ids.tolist(), media, theirs.tolist()))
    found: list[Any] = engine.ask(*(ids for ids, _, _ in prompts), media=[media for _, media, _ in prompts])
    assert [output for output, _ in found] == [theirs for _, _, theirs in prompts]


def as_wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format="WAV", subtype="FLOAT")
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("family", [*HEARING, "gemma4"])
def test_bytes_of_recordings_give_the_tokens_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_way = {**LANGUAGE["gemma4"], "use_bidirectional_attention": None}  # as those that hear are
    monkeypatch.setitem(LANGUAGE, "gemma4", one_way)
    processor, model = write_model(tmp_path, family)
    worker, tokenizer = worker_of(tmp_path), load_tokenizer(tmp_path)
    engine = LocalEngine(tmp_path, new=NEW, dtype="float32", max_total_tokens=4096, cpu_threads=1, device="cpu")
    rng, prompts = np.random.default_rng(0), []
    place = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    if family == "gemma4":
        place, processor.feature_extractor = "<|AUDIO|>", transformers.Gemma4AudioFeatureExtractor()
    for count in (1, 2):
        sounds = [rng.normal(0, 0.1, int(16000 * seconds)).astype(np.float32) for seconds in (1.3, 2.9)[:count]]
        text = f"{place}\n" * count + "What is said?"
        given = processor(text=text, audio=sounds, sampling_rate=16000, return_tensors="pt")
        with torch.inference_mode():
            theirs = model.generate(**given, max_new_tokens=NEW, do_sample=False)[0, given["input_ids"].shape[1] :]
        folder = tmp_path / str(count)
        folder.mkdir()
        items = prepare(worker, folder, [as_wav(each) for each in sounds], "audio")
        ids, media = expand(np.array(tokenizer.encode(text), dtype=np.int32), items, tokenizer)
        prompts.append((ids.tolist(), media, theirs.tolist()))
    found: list[Any] = engine.ask(*(ids for ids, _, _ in prompts), media=[media for _, media, _ in prompts])
    assert [output for output, _ in found] == [theirs for _, _, theirs in prompts]
