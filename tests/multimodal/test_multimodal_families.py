"""What a worker makes of images, beside Transformers' own processor of the same checkpoint."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bough.core.media import MEDIA_ID
from bough.multimodal.decoding import Limits
from bough.multimodal.expansion import PreparedItem, expand
from bough.multimodal.worker import Hello, Task, Worker
from bough.tokenizer.load import load_tokenizer
from tests.multimodal.checkpoints import SPECS, write_checkpoint

SIZES = [(40, 60), (90, 33), (28, 28)]  # width, height


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def as_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def worker_of(folder: Path, **options: Any) -> Worker:
    return Worker(Hello(str(folder), str(folder), options, Limits(10**7, 60.0), 60.0))


def prepare(worker: Worker, folder: Path, contents: Sequence[bytes], kind: Any = "image") -> list[PreparedItem]:
    items = []
    for number, content in enumerate(contents):
        task = Task(kind, content, str(folder / f"features{number}"), alone=len(contents) == 1)
        items.append(PreparedItem(kind, bytes([number]) * 16, task.file, worker.prepare(task)))
    return items


def read_features(item: PreparedItem) -> dict[str, Any]:
    data = Path(item.file).read_bytes()
    return {
        f.name: np.frombuffer(data, f.dtype, int(np.prod(f.shape)), f.offset).reshape(f.shape)
        for f in item.prepared.features
    }


def restored(ids: Any, media: Any, items: Sequence[PreparedItem]) -> list[int]:
    """The prompt with the tokens that stand for rows in the place of their numbers."""
    plain = ids.copy()
    for placed, item in zip(media.items, items, strict=True):
        for start, count in placed.spans:
            assert (ids[start : start + count] >= MEDIA_ID).all()
            plain[start : start + count] = item.prepared.row
    return plain.tolist()


@pytest.mark.parametrize("said", [True, False], ids=["with processor_config.json", "without"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("family", SPECS)
def test_prompt_and_arrays_are_those_of_transformers(family: str, count: int, said: bool, tmp_path: Path) -> None:
    processor = write_checkpoint(tmp_path, family, processor_config=said)
    images = [picture(*size, seed) for seed, size in enumerate(SIZES[:count])]
    place = SPECS[family].place
    text = "user\n" + "\n".join(place for _ in images) + "\nWhat is this?"
    nested = family in ("gemma3", "idefics3", "smolvlm") or (family == "llava_onevision" and count > 1)
    expected = processor(text=text, images=[images] if nested else images, return_tensors="np")
    worker, tokenizer = worker_of(tmp_path), load_tokenizer(tmp_path)
    items = prepare(worker, tmp_path, [as_png(image) for image in images])
    ids, media = expand(np.array(tokenizer.encode(text), dtype=np.int32), items, tokenizer)
    assert restored(ids, media, items) == expected["input_ids"][0].tolist()
    ours = [read_features(item) for item in items]
    for name in ours[0].keys() - {"batch_num_images"}:
        theirs = np.asarray(expected[name])
        if theirs.shape[0] == count != 1:
            for array, other in zip((each[name][0] for each in ours), theirs, strict=True):
                cut = other[tuple(slice(0, n) for n in array.shape)]  # a batch is padded to its largest
                np.testing.assert_array_equal(array, cut)
        elif theirs.ndim > 1 and family in ("idefics3", "smolvlm"):
            parts = [each[name][0] for each in ours]
            np.testing.assert_array_equal(np.concatenate(parts), theirs[0])
        else:
            np.testing.assert_array_equal(np.concatenate([each[name] for each in ours]), theirs)
    whole = np.array(expected["input_ids"][0], dtype=np.int32)
    again, same = expand(whole, items, tokenizer)
    assert restored(again, same, items) == whole.tolist() and same == media
