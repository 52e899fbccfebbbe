"""What a worker makes of images, beside Transformers' own processor of the same checkpoint."""

from __future__ import annotations

import hashlib
import importlib
import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from bough.core.errors import RequestError
from bough.core.media import MEDIA_ID
from bough.multimodal.decoding import Limits
from bough.multimodal.expansion import expand
from bough.multimodal.families import Family, Hello, Prepared, Task
from bough.tokenizer.load import load_tokenizer
from tests.multimodal.checkpoints import SPECS, as_moonshot, write_checkpoint, write_hearing

SIZES = [(40, 60), (90, 33), (28, 28)]  # width, height


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def as_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def worker_of(folder: Path, **options: Any) -> Family:
    return Family(Hello(str(folder), str(folder), options, Limits(10**7, 60.0), 60.0))


def prepare(worker: Family, folder: Path, contents: Sequence[bytes], kind: Any = "image") -> list[Prepared]:
    items = []
    for number, content in enumerate(contents):
        alone, file = len(contents) == 1, str(folder / f"features{number}")
        digest = hashlib.blake2b(content, digest_size=16, salt=bytes([alone])).digest()
        items.append(worker.prepare(Task(kind, content, None, None, alone, file, digest)))
    return items


def read_features(item: Prepared) -> dict[str, Any]:
    data = Path(item.file).read_bytes()
    return {
        f.name: np.frombuffer(data, f.dtype, int(np.prod(f.shape)), f.offset).reshape(f.shape) for f in item.features
    }


def restored(ids: Any, media: Any, items: Sequence[Prepared]) -> list[int]:
    """The prompt with the tokens that stand for rows in the place of their numbers."""
    plain = ids.copy()
    for placed, item in zip(media.items, items, strict=True):
        for start, count in placed.spans:
            assert (ids[start : start + count] >= MEDIA_ID).all()
            plain[start : start + count] = item.row
    return plain.tolist()


@pytest.mark.parametrize("said", [True, False], ids=["with processor_config.json", "without"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("family", SPECS)
def test_prompt_and_arrays_are_those_of_transformers(family: str, count: int, said: bool, tmp_path: Path) -> None:
    processor = write_checkpoint(tmp_path, family, processor_config=said)
    images = [picture(*size, seed) for seed, size in enumerate(SIZES[:count])]
    place = SPECS[family].place
    text = "user\n" + "\n".join(place for _ in images) + "\nWhat is this?"
    nested = family in ("gemma3", "gemma4", "idefics3", "smolvlm") or (family == "llava_onevision" and count > 1)
    expected = processor(text=text, images=[images] if nested else images, return_tensors="np")
    worker, tokenizer = worker_of(tmp_path), load_tokenizer(tmp_path)
    items = prepare(worker, tmp_path, [as_png(image) for image in images])
    ids, media = expand(np.array(tokenizer.encode(text), dtype=np.int32), items, tokenizer)
    assert restored(ids, media, items) == expected["input_ids"][0].tolist()
    ours = [read_features(item) for item in items]
    assert "pixel_values" in ours[0]
    for name in {name for each in ours for name in each} - {"batch_num_images"}:
        theirs = np.asarray(expected[name])
        if theirs.shape[0] == count != 1:
            for array, other in zip((each[name][0] for each in ours), theirs, strict=True):
                cut = other[tuple(slice(0, n) for n in array.shape)]  # a batch is padded to its largest
                np.testing.assert_array_equal(array, cut)
        elif theirs.ndim > 1 and family in ("idefics3", "smolvlm"):
            parts = [each[name][0] for each in ours]
            np.testing.assert_array_equal(np.concatenate(parts), theirs[0])
        else:
            axis = -1 if family == "minicpmv4_6" and name == "pixel_values" else 0
            there = [each[name] for each in ours if name in each]
            np.testing.assert_array_equal(np.concatenate(there, axis), theirs)
    whole = np.array(expected["input_ids"][0], dtype=np.int32)
    again, same = expand(whole, items, tokenizer)
    assert restored(again, same, items) == whole.tolist() and same == media


def test_kimis_settings_may_be_those_that_moonshot_publishes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "kimi_k25", processor_config=False)
    image, folder = as_png(picture(90, 33)), tmp_path / "again"
    (before,) = prepare(worker_of(tmp_path), tmp_path, [image])
    as_moonshot(tmp_path)
    folder.mkdir()
    (after,) = prepare(worker_of(tmp_path), folder, [image])
    assert (after.tokens, after.place) == (before.tokens, before.place)
    assert Path(after.file).read_bytes() == Path(before.file).read_bytes()
    for name in ("max_patches", "in_patch_limit"):  # of --mm-process-config
        small = Task("image", image, None, None, True, str(folder / name))
        assert len(worker_of(tmp_path, image={name: 1}).prepare(small).ids) < len(after.ids)


def clip_of(frames: int, width: int, height: int, *, still: bool = False) -> bytes:
    """As NumPy's file, which a worker reads as a clip of 24 frames a second."""
    shape = (1 if still else frames, height, width, 3)
    array = np.random.default_rng(5).integers(0, 255, shape, dtype=np.uint8)
    file = io.BytesIO()
    np.save(file, np.broadcast_to(array, (frames, height, width, 3)))
    return file.getvalue()


QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
GLMS = ("glm4v", "glm4v_moe")
WATCHING = (*QWENS, *GLMS, "minicpmv4_6")


@pytest.mark.parametrize("family", [*QWENS, *GLMS])
def test_positions_are_those_of_get_rope_index(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    worker, tokenizer = worker_of(tmp_path, video={"max_pixels": 32 * 32 * 20}), load_tokenizer(tmp_path)
    images = prepare(worker, tmp_path, [as_png(picture(40, 60)), as_png(picture(90, 33))])
    folder = tmp_path / "clips"
    folder.mkdir()
    clips = prepare(worker, folder, [clip_of(60, 64, 90)], "video")
    place = SPECS[family].place
    film = place.replace("image_pad", "video_pad").replace("<image>", "<video>")
    text = f"Compare {place}{film} and\n{place}."
    items = [images[0], clips[0], images[1]]
    ids, media = expand(np.array(tokenizer.encode(text), dtype=np.int32), [*images, *clips], tokenizer)
    plain = restored(ids, media, items)
    kinds = np.zeros(len(plain), dtype=np.int64)
    for item in media.items:
        for start, count in item.spans:
            kinds[start : start + count] = 2 if item.kind == "video" else 1
    config = worker.config
    name = type(config).__name__.removesuffix("Config") + "Model"
    cls = getattr(transformers, name)
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    model.config = config
    features = [read_features(item) for item in items]
    pictures = np.concatenate([features[i]["image_grid_thw"] for i in (0, 2)])
    grids: dict[str, Any] = {"image_grid_thw": torch.tensor(pictures)}
    grids["video_grid_thw"] = torch.tensor(features[1]["video_grid_thw"].copy())
    if family == "qwen2_5_vl":
        # 60 frames at 24 a second, of which 5 are wanted at 2 a second: 4, as pairs
        fps = 4 / 60 * 24
        grids["second_per_grid_ts"] = [2 / fps]
    expected, delta = model.get_rope_index(torch.tensor([plain]), torch.tensor(kinds[None]), **grids)
    positions = np.frombuffer(media.positions, dtype=np.int32).reshape(3, -1)
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())
    assert media.delta == int(delta)


def patchified(frames: Any, step: int, patch: int, merge: int) -> Any:
    """The layout of a clip's patches, as Transformers' video processors write it down."""
    count, channels, height, width = frames.shape
    rows, columns = height // patch, width // patch
    parts = (count // step, step, channels, rows // merge, merge, patch, columns // merge, merge, patch)
    return frames.reshape(parts).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * step * patch * patch)


@pytest.mark.parametrize("own", [{}, {"image_mean": [0.3, 0.4, 0.5], "image_std": [0.2, 0.6, 0.7]}], ids=["", "own"])
@pytest.mark.parametrize("family", [*QWENS, *GLMS])
def test_each_frame_has_its_own_part_of_a_patch(family: str, own: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(own))
    side = 64 if family.startswith("qwen3") else 56
    options = {
        "num_frames": 4,
        "min_pixels": side * side,
        "max_pixels": side * side * (4 if family.startswith(("qwen3", "glm")) else 1),
    }
    worker = worker_of(tmp_path, video=options)
    content = clip_of(4, side, side)
    (clip,) = prepare(worker, tmp_path, [content], "video")
    found = read_features(clip)
    image = worker._processed
    frames = np.load(io.BytesIO(content)).transpose(0, 3, 1, 2).astype(np.float32) / 255
    used = [own.get(name, getattr(image, name)) for name in ("image_mean", "image_std")]  # those of images, else
    mean, std = (np.array(each, dtype=np.float32).reshape(1, 3, 1, 1) for each in used)
    expected = patchified((frames - mean) / std, 2, image.patch_size, 2)
    np.testing.assert_allclose(found["pixel_values_videos"], expected, atol=1e-5)
    assert found["video_grid_thw"].tolist() == [[2, side // image.patch_size, side // image.patch_size]]


def test_a_still_clip_is_the_picture_repeated(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen2_vl")
    limits = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12}
    worker = worker_of(tmp_path, video={**limits, "num_frames": 2})
    content = clip_of(2, 70, 50, still=True)
    (clip,) = prepare(worker, tmp_path, [content], "video")
    folder = tmp_path / "image"
    folder.mkdir()
    (image,) = prepare(worker, folder, [as_png(Image.fromarray(np.load(io.BytesIO(content))[0]))])
    np.testing.assert_array_equal(read_features(clip)["pixel_values_videos"], read_features(image)["pixel_values"])


def test_qwen3_writes_the_time_of_each_pair_of_frames(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_vl")
    worker, tokenizer = worker_of(tmp_path, video={"max_pixels": 32 * 32 * 20}), load_tokenizer(tmp_path)
    (clip,) = prepare(worker, tmp_path, [clip_of(96, 64, 64)], "video")  # four seconds
    text = tokenizer.decode(clip.ids.tolist(), skip_special_tokens=False)
    times = re.findall(r"<([\d.]+) seconds><\|vision_start\|>(?:<\|video_pad\|>)+<\|vision_end\|>", text)
    # Eight of the frames 0 to 95, evenly: 0, 14, 27, 41, ... at 24 a second, in pairs.
    indices = [0, 14, 27, 41, 54, 68, 81, 95]
    assert times == [f"{(a + b) / 48:.1f}" for a, b in zip(indices[::2], indices[1::2], strict=True)]


def test_glm_writes_the_second_of_each_pair_of_frames(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "glm4v")
    worker, tokenizer = worker_of(tmp_path, video={"max_pixels": 28 * 28 * 20}), load_tokenizer(tmp_path)
    (clip,) = prepare(worker, tmp_path, [clip_of(108, 64, 64)], "video")  # four and a half seconds
    assert tokenizer.token_text(clip.place) == "<video>" and tokenizer.token_text(clip.row) == "<image>"
    text = tokenizer.decode(clip.ids.tolist(), skip_special_tokens=False)
    assert re.sub("(<image>)+", "+", text) == "".join(
        f"<|begin_of_image|>+<|end_of_image|>{second}" for second in (0, 1, 2, 3, 4)
    )


def test_frames_of_minicpm_are_those_of_transformers(tmp_path: Path) -> None:
    """Its video processor resizes with torchvision; here with Pillow, as Bough does."""
    from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
    from transformers.video_utils import VideoMetadata

    processor = write_checkpoint(tmp_path, "minicpmv4_6")
    settings = {"patch_size": 7, "scale_resolution": 56, "max_slice_nums": 2, "slice_mode": True}
    worker, tokenizer = worker_of(tmp_path, video=settings), load_tokenizer(tmp_path)
    theirs = MiniCPMV4_6VideoProcessor.__new__(MiniCPMV4_6VideoProcessor)

    def resize(video: torch.Tensor, size: Any, resample: Any) -> torch.Tensor:
        flat = video.flatten(0, -4).permute(0, 2, 3, 1).numpy()
        done = [Image.fromarray(each).resize((size.width, size.height), Image.Resampling.BICUBIC) for each in flat]
        pixels = torch.from_numpy(np.stack([np.asarray(each) for each in done])).permute(0, 3, 1, 2)
        return pixels.unflatten(0, video.shape[:-3])

    theirs.resize = resize
    theirs.rescale_and_normalize = lambda videos, *_: (videos / 255 - 0.5) / 0.5
    processor.video_slice_mode = True
    for number, (width, height) in enumerate(((56, 56), (150, 40), (33, 90))):
        content = clip_of(60, width, height)
        folder = tmp_path / str(number)
        folder.mkdir()
        (clip,) = prepare(worker, folder, [content], "video")
        chosen = np.load(io.BytesIO(content))[[0, 24, 48]]  # one a second
        metadata = VideoMetadata(60, 24.0, duration=2.5)
        more = {"stack_frames": 1, "max_num_frames": 128, "return_tensors": None, "video_metadata": [metadata]}
        scale = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": 0, "image_std": 0}
        frames = torch.from_numpy(chosen).permute(0, 3, 1, 2)
        expected = theirs._preprocess([frames], True, None, **scale, **settings, **more)
        found = read_features(clip)
        np.testing.assert_array_equal(found["target_sizes_videos"], expected["target_sizes_videos"].numpy())
        np.testing.assert_allclose(found["pixel_values_videos"], expected["pixel_values_videos"].numpy(), atol=1e-5)
        text = processor.replace_video_token(expected, 0, video_token_divisor=16)
        assert clip.ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
        assert clip.before == "<image_id>{}</image_id>"


@pytest.mark.parametrize(("total", "fps"), [(1, 24.0), (3, 30.0), (50, 10.0), (97, 29.97), (3000, 25.0), (10**5, 25.0)])
def test_frames_are_sampled_as_in_transformers(total: int, fps: float, tmp_path: Path) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    write_checkpoint(tmp_path, "qwen3_vl")
    theirs = Qwen3VLVideoProcessor.__new__(Qwen3VLVideoProcessor)
    expected = theirs.sample_frames(VideoMetadata(total, fps)).tolist()
    assert worker_of(tmp_path).choose_frames(total, fps, None) == expected
    write_checkpoint(tmp_path / "older", "qwen2_vl")
    chosen = worker_of(tmp_path / "older").choose_frames(total, fps, None)
    assert len(chosen) == max(min(max(total / fps * 2, 4), 768, total) // 2 * 2, 1)
    assert chosen == torch.arange(0, total, total / len(chosen), dtype=torch.float64).int().tolist()
    metadata = VideoMetadata(total, fps, duration=total / fps)
    for family, name in (("glm4v", "Glm4v"), ("minicpmv4_6", "MiniCPMV4_6")):
        write_checkpoint(tmp_path / family, family)
        module = importlib.import_module(f"transformers.models.{family}.video_processing_{family}")
        cls = getattr(module, f"{name}VideoProcessor")
        expected = [int(index) for index in cls.__new__(cls).sample_frames(metadata)]
        assert worker_of(tmp_path / family).choose_frames(total, fps, None) == expected
        assert len(worker_of(tmp_path / family).choose_frames(100, fps, 8)) == 8


def test_frames_are_fitted_as_in_transformers(tmp_path: Path) -> None:
    low, high = 32 * 32 * 40, 32 * 32 * 900
    for family, factor in (("qwen3_vl", 32), ("glm4v", 28)):
        module = importlib.import_module(f"transformers.models.{family}.video_processing_{family}")
        write_checkpoint(tmp_path / family, family)
        worker = worker_of(tmp_path / family, video={"min_pixels": low, "max_pixels": high})
        for count, height, width in itertools.product((1, 2, 5, 30, 768), (16, 64, 333, 1080), (17, 320, 1920)):
            expected = module.smart_resize(max(count, 2), height, width, 2, factor, low, high)
            assert worker.fit_frame(count, height, width) == expected


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from bough.multimodal.decoding import Limits
from bough.multimodal.families import Family, Hello, Task

for folder in map(Path, sys.argv[1:]):
    family = Family(Hello(str(folder), str(folder), {}, Limits(10**7, 60.0), 60.0))
    for file in sorted(folder.glob("given-*")):
        kind = file.name.removeprefix("given-")
        done = family.prepare(Task(kind, file.read_bytes(), None, None, True, str(folder / f"bare-{kind}")))
        (folder / f"tokens-{kind}").write_bytes(done.tokens)
"""


@pytest.mark.slow
def test_workers_need_no_torch(tmp_path: Path) -> None:
    given = {}
    for family in SPECS:
        folder = tmp_path / family
        write_checkpoint(folder, family)
        kinds = {"image": as_png(picture(90, 33)), **({"video": clip_of(30, 64, 90)} if family in WATCHING else {})}
        given |= {(folder, kind): content for kind, content in kinds.items()}
        for kind, content in kinds.items():
            (folder / f"given-{kind}").write_bytes(content)
    folders = [str(tmp_path / family) for family in SPECS]
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *folders], check=True, cwd=Path(__file__).parents[2])
    for (folder, kind), content in given.items():
        done = worker_of(folder).prepare(Task(kind, content, None, None, True, str(folder / kind)))  # type: ignore[arg-type]
        assert (folder / f"tokens-{kind}").read_bytes() == done.tokens
        assert (folder / f"bare-{kind}").read_bytes() == (folder / kind).read_bytes()


@pytest.mark.parametrize("family", ["qwen2_audio", "gemma4"])
def test_sound_has_the_tokens_that_transformers_gives_it(family: str, tmp_path: Path) -> None:
    if family == "gemma4":
        processor = write_checkpoint(tmp_path, family)
        processor.feature_extractor = transformers.Gemma4AudioFeatureExtractor()
    else:
        processor = write_hearing(tmp_path)
    worker, own = worker_of(tmp_path), load_tokenizer(tmp_path)
    text = "<|AUDIO|> What is said?" if family == "gemma4" else "<|audio_bos|><|AUDIO|><|audio_eos|> What is said?"
    for seconds in (0.5, 3.7, 30.0):
        samples = np.random.default_rng(0).normal(0, 0.1, int(16000 * seconds)).astype(np.float32)
        file = io.BytesIO()
        np.save(file, samples)
        expected = processor(text=text, audio=[samples], sampling_rate=16000, return_tensors="np")
        folder = tmp_path / str(seconds)
        folder.mkdir()
        (item,) = prepare(worker, folder, [file.getvalue()], "audio")
        ids, media = expand(np.array(own.encode(text), dtype=np.int32), [item], own)
        assert restored(ids, media, [item]) == expected["input_ids"][0].tolist()
        for name, array in read_features(item).items():
            np.testing.assert_array_equal(array, np.asarray(expected[name]))
    file = io.BytesIO()
    np.save(file, np.zeros(16000 * 31, dtype=np.float32))
    with pytest.raises(RequestError, match="at most 30 s"):
        prepare(worker, tmp_path, [file.getvalue()], "audio")


@pytest.mark.parametrize("count", [1, 320])
def test_sound_that_is_shorter_than_a_token_is_refused(count: int, tmp_path: Path) -> None:
    write_hearing(tmp_path)
    array = io.BytesIO()
    np.save(array, np.zeros(count, dtype=np.float32))
    with pytest.raises(RequestError, match=r"more than 0.02 s"):
        prepare(worker_of(tmp_path), tmp_path, [array.getvalue()], "audio")


def test_a_checkpoint_without_ears_says_so(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gemma4")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "audio_config": None}))
    with pytest.raises(RequestError, match="no audio encoder"):
        prepare(worker_of(tmp_path), tmp_path, [b"RIFF"], "audio")


def test_numbers_do_not_match_is_said_with_the_counts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llava")
    worker, tokenizer = worker_of(tmp_path), load_tokenizer(tmp_path)
    items = prepare(worker, tmp_path, [as_png(picture(30, 30)), as_png(picture(40, 40))])
    for text, count in (("<image> only", 1), ("<image><image><image>", 3), ("<image>" * 7, 7), ("none", 0)):
        with pytest.raises(RequestError, match=rf"2 images, {count} placeholders, 8 when expanded"):
            expand(np.array(tokenizer.encode(text), dtype=np.int32), items, tokenizer)


def test_equal_contents_have_equal_numbers_and_others_do_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llava")
    worker, tokenizer = worker_of(tmp_path), load_tokenizer(tmp_path)
    first, second = prepare(worker, tmp_path, [as_png(picture(30, 30)), as_png(picture(40, 40))])
    prompt = np.array(tokenizer.encode("<image> <image> <image>"), dtype=np.int32)
    ids, media = expand(prompt, [first, second, first], tokenizer)
    rows = [ids[start : start + count].tolist() for item in media.items for start, count in item.spans]
    assert rows[0] == rows[2] != rows[1] and len(set(rows[0])) == len(rows[0])


def test_placeholders_side_by_side_are_no_item_s_text(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llava")  # four tokens for each image
    worker, tokenizer = worker_of(tmp_path), load_tokenizer(tmp_path)
    items = prepare(worker, tmp_path, [as_png(picture(30, 30, seed)) for seed in range(5)])
    ids, media = expand(np.array(tokenizer.encode("<image>" * 5), dtype=np.int32), items, tokenizer)
    assert [item.spans for item in media.items] == [((4 * number, 4),) for number in range(5)]
    again, same = expand(np.array(restored(ids, media, items), dtype=np.int32), items, tokenizer)
    assert again.tolist() == ids.tolist() and same == media
