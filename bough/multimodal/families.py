"""What each family makes of decoded media: the arrays of its encoder, and the text that stands for an item.

Both are Transformers' own, in a worker process: the image processors that compute with Pillow, and the arithmetic of
the processors, which are made without their constructors: those want a tokenizer of Transformers, and torchvision.
"""

import json
import math
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from bough.core.errors import RequestError
from bough.core.files import table_beside
from bough.core.media import Feature, MediaKind
from bough.core.plan import IntArray
from bough.multimodal.decoding import Array, Limits, decode_audio, decode_image, decode_video
from bough.tokenizer.load import load_tokenizer

# Of what image processors return: no encoder takes them.
UNUSED = {"rows", "cols", "grids", "num_crops", "num_patches", "num_patches_per_image", "num_soft_tokens_per_image"}
ROW_END, END = "[IMG_BREAK]", "[IMG_END]"  # of mistral3
FAMILIES, TOKENS = table_beside(__file__, "families.toml"), table_beside(__file__, "tokens.toml")
# What clips may have for themselves, beside the settings of images; the first four are of MiniCPM-V.
OF_CLIPS = ("max_slice_nums", "scale_resolution", "slice_mode", "downsample_mode", "image_mean", "image_std")
ALIGNMENT = 64  # of an array in its file, in bytes


class Hello(msgspec.Struct, frozen=True):
    folder: str  # of the checkpoint
    tokenizer: str
    options: dict[str, dict[str, Any]]  # by kind
    limits: Limits
    timeout_s: float


class Task(msgspec.Struct, frozen=True):
    kind: MediaKind
    content: bytes
    detail: str | None
    num_frames: int | None
    alone: bool  # there is no other image in the prompt, which matters to LLaVA-OneVision
    file: str = ""  # that gets the arrays
    digest: bytes = b""


class Prepared(msgspec.Struct, frozen=True, weakref=True):
    """An item as its prompt needs it. `tokens` are without line breaks around them: tokenizers join those to others."""

    kind: MediaKind
    digest: bytes
    file: str
    features: tuple[Feature, ...]
    nbytes: int
    tokens: bytes  # int32
    place: int  # the token that stands for an item in a prompt
    row: int  # the one that stands for a row of the encoder
    before: str  # what stands before it, where a prompt has its placeholder alone; {} is its number in the prompt
    after: str
    grid: tuple[int, int, int] | None  # of the rows, in time, height and width (M-RoPE)
    interval: float  # between two steps of time

    @property
    def ids(self) -> IntArray:
        return np.frombuffer(self.tokens, dtype=np.int32)


Result = tuple[dict[str, Array], str, tuple[int, int, int] | None, float]  # arrays by name, text, grid, interval


class Family:
    def __init__(self, hello: Hello) -> None:
        import transformers
        from transformers.models.auto import feature_extraction_auto, image_processing_auto, processing_auto

        folder, options = Path(hello.folder), hello.options
        self._limits, self._tokenizer = hello.limits, load_tokenizer(Path(hello.tokenizer))

        def read(name: str) -> dict[str, Any]:
            path = folder / name
            return dict(json.loads(path.read_text())) if path.is_file() else {}

        def token(name: str, text: str = "") -> str:
            """As the configuration numbers it, else by its usual text."""
            ids = (getattr(config, f"{name}_token_{suffix}", None) for suffix in ("id", "index"))
            number = next((number for number in ids if number is not None), None)
            return text if number is None else self._tokenizer.token_text(number)

        self.config = config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        self.type: str = config.model_type
        if hasattr(config, "media_placeholder_token_id"):  # so Moonshot's own files have it
            config.image_token_id = config.media_placeholder_token_id
        alike = FAMILIES[self.type].get("like", self.type)
        self._timed, glm = self.type.startswith(("qwen3_vl", "qwen3_5")), self.type.startswith("glm4v")
        self._apart = self._timed or glm  # timestamps stand between the frames of its clips
        self._in_grid = FAMILIES[self.type].get("grid", False)
        vision = getattr(config, "vision_config", SimpleNamespace(patch_size=1, model_type=""))
        vision = getattr(vision, "sam_config", vision)
        cls: Any = SimpleNamespace  # that of mistral3 needs torchvision
        if self.type != "mistral3":
            cls = getattr(transformers, processing_auto.PROCESSOR_MAPPING_NAMES[alike])
        default = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(alike, {}).get("pil")
        default = default or feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES.get(self.type)
        given = read("processor_config.json")
        said = given.get("image_processor") or given.get("feature_extractor") or read("preprocessor_config.json")
        name = str(said.pop("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil") + "Pil"
        names = ("patch_size", "temporal_patch_size", "spatial_merge_size")
        patches = {n.removeprefix("spatial_"): getattr(vision, n, 1) for n in names} if self._in_grid else {}
        usual = {"feature_size": config.audio_config.num_mel_bins} if self.type == "qwen2_audio" else patches
        usual |= said | options.get("audio" if self.type == "qwen2_audio" else "image", {})
        if self.type == "kimi_k25":
            self._processed: Any = msgspec.convert((usual.get("media_proc_cfg") or {}) | usual, KimiImages)
        else:
            self._processed = getattr(transformers, name if hasattr(transformers, name) else default)(**usual)
        self._hearing = self._processed
        if self.type == "gemma4":
            sound = {**(given.get("feature_extractor") or {}), **options.get("audio", {})}
            self._hearing = transformers.Gemma4AudioFeatureExtractor(**sound)
        self._clips = given.get("video_processor") or read("video_preprocessor_config.json")
        if self.type in SAMPLING:
            self._clips.pop("num_frames", None)  # Transformers does not look at it
        self._clips |= options.get("video", {})
        self._clips_own = {name: self._clips[name] for name in OF_CLIPS if self._clips.get(name) is not None}
        # The text that stands for a row of the encoder, and the one that stands for an item in a prompt.
        self._rows = {kind: token(kind) for kind in ("image", "video", "audio")}
        self._places = {**self._rows, **({"image": token("boi")} if self.type == "gemma3" else {})}
        if glm:  # rows of clips are those of images
            self._rows["video"] = self._rows["image"]
        counts = _counts(config, vision)
        counts |= {key: value for key, value in given.items() if key in counts and value is not None}
        seats = self._rows["image"] * counts["image_seq_length"]
        self._processor = cls.__new__(cls)
        self._processor.__dict__.update(
            counts | TOKENS,
            image_processor=self._processed,
            video_processor=SimpleNamespace(**patches),
            image_token=self._rows["image"],
            video_token=self._places["video"],
            **{f"{name}_token": token(name) for name in ("audio", "boi", "eoi", "boa", "eoa")},
            slice_mode=getattr(self._processed, "slice_mode", False),
            video_slice_mode=self._clips.get("slice_mode", getattr(self._processed, "slice_mode", False)),
            vision_start_token=token("vision_start", "<|vision_start|>"),
            vision_end_token=token("vision_end", "<|vision_end|>"),
            full_image_sequence=f"\n\n{token('boi')}{seats}{token('eoi')}\n\n",
        )
        self._defaults = dict(getattr(cls, "images_kwargs", {})) | {"return_tensors": "np"}
        self._numbering = "<image_id>{}</image_id>" if getattr(self._processed, "use_image_id", False) else ""
        if self.type == "mistral3":
            self._defaults["patch_size"] = counts["patch_size"] * config.spatial_merge_size

    def prepare(self, task: Task) -> Prepared:
        arrays, given, grid, interval = getattr(self, f"_{task.kind}")(task)
        features, nbytes = write_features(task.file, arrays)
        text = given.strip("\n")
        before, _, after = given.partition(text)
        before += self._numbering
        ids, (place,), (row,) = map(self._encode, (text, self._places[task.kind], self._rows[task.kind]))
        tokens = np.array(ids, dtype=np.int32).tobytes()
        item = (task.kind, task.digest, task.file, features, nbytes)
        return Prepared(*item, tokens, place, row, before, after, grid, interval)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _image(self, task: Task) -> Result:
        image = decode_image(task.content, self._limits, task.detail)
        several = self.type == "llava_onevision" and not task.alone
        inputs = self._processed([[image, image]] if several else [image], **self._defaults)
        if self.type == "mistral3":
            height, width = (int(n) // self._defaults["patch_size"] for n in inputs["image_sizes"][0])
            text = ROW_END.join([self._rows["image"] * width] * height) + END
        else:
            divisor = _divisor(getattr(self._processed, "downsample_mode", None))
            text = self._processor.replace_image_token(inputs, 0, image_token_divisor=divisor)
        arrays = {name: np.asarray(value) for name, value in inputs.items() if name not in UNUSED}
        if several:
            arrays = {name: value if name == "batch_num_images" else value[:1] for name, value in arrays.items()}
        return arrays, text, self._merged(arrays["image_grid_thw"][0]) if self._in_grid else None, 1.0

    def choose_frames(self, total: int, fps: float, asked: int | None) -> list[int]:
        """Which of so many frames are looked at, as Transformers samples them."""
        video, step = self._clips, 1 if self._timed or self.type == "minicpmv4_6" else 2
        count = asked or video.get("num_frames")
        if count is None and self.type in SAMPLING:
            return SAMPLING[self.type](total, fps, video)
        if count is None:
            most = min(video.get("max_frames", 768), total) // step * step
            count = min(max(total / fps * (video.get("fps") or 2), video.get("min_frames", 4)), most)
        count = max(int(min(count, total)) // step * step, 1)
        if self._timed:
            return [int(i) for i in np.linspace(0, total - 1, count).round()]
        return [int(i * total / count) for i in range(count)]

    def fit_frame(self, count: int, height: int, width: int) -> tuple[int, int]:
        """The height and width in which so many frames are looked at."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        factor, step = self._processed.patch_size * self._processed.merge_size, self._processed.temporal_patch_size
        usual = (112**2, 28**2 * 60000) if self._apart and not self._timed else (128 * factor**2, 768 * factor**2)
        size = {"shortest_edge": usual[0], "longest_edge": usual[1], **(self._clips.get("size") or {})}
        low, high = (self._clips.get(name) for name in ("min_pixels", "max_pixels"))
        low, high = low or size["shortest_edge"], high or size["longest_edge"]
        if not self._apart:
            fitted = smart_resize(height, width, factor, low, high)
            return int(fitted[0]), int(fitted[1])
        # The limits hold for all frames together. What Transformers has for this needs torch.
        count, grown = max(count, step), max(1.0, factor / height, factor / width)
        sides = int(height * grown), int(width * grown)
        rows, columns = (round(side / factor) for side in sides)
        pixels = round(count / step) * step * rows * columns * factor**2
        if pixels > high:
            scale = math.sqrt(count * sides[0] * sides[1] / high)
            rows, columns = (max(1, math.floor(side / scale / factor)) for side in sides)
        elif pixels < low:
            scale = math.sqrt(low / (count * sides[0] * sides[1]))
            rows, columns = (math.ceil(side * scale / factor) for side in sides)
        return rows * factor, columns * factor

    def _video(self, task: Task) -> Result:
        """The image processor repeats each picture over a patch of time; here each frame gets its own part of it."""
        from transformers.video_utils import VideoMetadata

        choose = partial(self.choose_frames, asked=task.num_frames)
        if self.type == "minicpmv4_6":
            return self._frames(decode_video(task.content, self._limits, choose, lambda count, *size: size).frames)
        clip = decode_video(task.content, self._limits, choose, self.fit_frame)
        step, size = self._processed.temporal_patch_size, self._processed.patch_size**2
        frames = clip.frames + clip.frames[-1:] * (-len(clip.frames) % step)
        inputs = self._processed(frames, do_resize=False, return_tensors="np", **self._clips_own)
        _, height, width = inputs["image_grid_thw"][0]
        patches = inputs["pixel_values"].reshape(-1, step, height * width, 3, step, size)[..., 0, :]
        values = patches.transpose(0, 2, 3, 1, 4).reshape(-1, 3 * step * size)
        grid = np.array([[len(patches), height, width]])
        metadata = VideoMetadata(clip.total, clip.fps, frames_indices=list(clip.indices))
        text = self._processor.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
        interval = 1.0
        if self.type == "qwen2_5_vl":
            interval = self.config.vision_config.tokens_per_second * step / metadata.sampled_fps
        seen = [1, height, width] if self._apart else grid[0]
        return {"pixel_values_videos": values, "video_grid_thw": grid}, text, self._merged(seen), interval

    def _frames(self, frames: list[Array]) -> Result:
        """A clip of MiniCPM-V: each frame is cut as an image is, by the clips' own settings."""
        inputs = self._processed(frames, **self._defaults, **self._clips_own)
        arrays = {f"{name}_videos": np.asarray(inputs[name]) for name in ("pixel_values", "target_sizes")}
        told = {**arrays, "num_frames_per_video": [len(frames)], "grids_videos": np.array(inputs["grids"])}
        divisor = _divisor(self._clips.get("downsample_mode", self._processed.downsample_mode))
        return arrays, self._processor.replace_video_token(told, 0, video_token_divisor=divisor), None, 1.0

    def _audio(self, task: Task) -> Result:
        prepare, rate = self._hearing, self._hearing.sampling_rate
        most = getattr(prepare, "chunk_length", 30)  # seconds; Gemma's extractor would cut off what is behind them
        seen_whole = getattr(self.config.get_text_config(), "use_bidirectional_attention", None)
        if self.config.audio_config is None or seen_whole:  # tokens of sound would see each other both ways, too
            raise RequestError("This checkpoint has no audio encoder; send text or images.")
        samples = decode_audio(task.content, self._limits, rate)
        if not 0.02 < len(samples) / rate <= most:  # less gives no token
            raise RequestError(f"This model takes more than 0.02 s and at most {most} s of audio at a time.")
        if self.type == "gemma4":
            arrays = dict(prepare([samples], return_tensors="np"))
            return arrays, self._processor.replace_audio_token(arrays, 0), None, 1.0
        options = {"sampling_rate": rate, "return_attention_mask": True, "padding": "max_length"}
        inputs = prepare(samples, return_tensors="np", **options)
        values, mask = inputs["input_features"], inputs["attention_mask"]
        count = ((int(mask.sum()) - 1) // 2 - 1) // 2 + 1
        return {"input_features": values, "feature_attention_mask": mask}, self._rows["audio"] * count, None, 1.0

    def _merged(self, grid: Any) -> tuple[int, int, int]:
        time, height, width = (int(n) for n in grid)
        return time, height // self._processed.merge_size, width // self._processed.merge_size


class KimiImages(msgspec.Struct, frozen=True):
    """What Transformers has for Kimi K2.5, which needs torchvision: never larger, and filled up to whole patches."""

    patch_size: int = 14
    merge_size: int = 2
    in_patch_limit: int = 16384  # these two as Moonshot has them, ...
    patch_limit_on_one_side: int = 512
    max_patches: int | None = None  # ... and here as Transformers does
    size: dict[str, int] = {}
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __call__(self, images: list[Any], **_: Any) -> dict[str, Array]:
        (image,), patch, limit = images, self.patch_size, self.max_patches or self.in_patch_limit
        most = self.size.get("max_height", self.patch_limit_on_one_side) * patch
        count = max(1, image.height // patch) * max(1, image.width // patch)
        scale = min(1.0, math.sqrt(limit / count), most / image.height, most / image.width)
        width, height = (min(max(1, int(side * scale)), most) for side in image.size)
        rows, columns = (-(-side // (self.merge_size * patch)) * self.merge_size for side in (height, width))
        pixels = np.zeros((rows * patch, columns * patch, 3), dtype=np.float32)
        pixels[:height, :width] = image.resize((width, height))  # bicubic
        pixels = (pixels - 255 * np.array(self.image_mean, np.float32)) / (255 * np.array(self.image_std, np.float32))
        cut = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        return {"pixel_values": cut.reshape(-1, 3, patch, patch), "image_grid_thw": np.array([[1, rows, columns]])}


def _divisor(mode: str | None) -> int:
    """How many patches MiniCPM-V joins to a row."""
    return 4 if mode == "4x" else 16


def _glm_frames(total: int, fps: float, video: dict[str, Any]) -> list[int]:
    """Two a second, over the whole clip; the last stands for a second one of its pair."""
    rate, seconds, most = video.get("fps") or 2, total / fps, video.get("max_duration", 300)
    places: Any = np.arange(max(int(seconds * rate), 1)) * fps / rate
    if seconds > most:
        places = np.linspace(0, seconds, int(most * rate)) * fps if int(most * rate) < total else range(total)
    chosen = [*dict.fromkeys(min(total - 1, math.ceil(place)) for place in places)]
    return chosen + chosen[-1:] * (len(chosen) % 2)


def _minicpm_frames(total: int, fps: float, video: dict[str, Any]) -> list[int]:
    """One a second; of long clips so many of ten a second."""
    seconds, most = total / fps, video.get("max_num_frames", 128)
    if seconds <= most:
        return [int(i * fps) for i in range(math.ceil(seconds))]
    tenths = [min(int(round(i * 0.1, 1) * fps), total - 1) for i in range(int(seconds / 0.1))]
    return [tenths[i] for i in np.linspace(0, len(tenths) - 1, most, dtype=int)]


SAMPLING = {"glm4v": _glm_frames, "glm4v_moe": _glm_frames, "minicpmv4_6": _minicpm_frames}


def _counts(config: Any, vision: Any) -> dict[str, Any]:
    """How many rows an image has, where the processor's own configuration does not say."""

    def first(size: Any) -> int:
        return int(size if isinstance(size, int) else size[0])

    patch, shrink = first(vision.patch_size), getattr(config, "downsample_ratio", 1)
    side = first(getattr(vision, "image_size", 0)) // patch
    return {
        "patch_size": patch,
        "downsample_ratio": 4,
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", "full"),
        "num_additional_image_tokens": int(vision.model_type == "clip_vision_model"),
        "num_image_tokens": side**2,
        "vision_aspect_ratio": getattr(config, "vision_aspect_ratio", "anyres_max_9"),
        "image_seq_len": (side // getattr(config, "scale_factor", 1)) ** 2,
        "image_seq_length": getattr(config, "mm_tokens_per_image", int((side * shrink) ** 2)),
    }


def write_features(path: str, arrays: dict[str, Any]) -> tuple[tuple[Feature, ...], int]:
    """One behind the other, in a file that nobody else can read."""
    features, offset = [], 0
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        for name, value in arrays.items():
            array = np.ascontiguousarray(value)
            file.seek(offset)
            file.write(array.data)
            features.append(Feature(name, array.dtype.name, array.shape, offset))
            offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        file.truncate(offset)
    return tuple(features), offset
