"""What each family makes of decoded media: the arrays of its encoder, and the text that stands for an item.

Both are Transformers' own, in a worker process: the image processors that compute with Pillow, and the arithmetic of the
processor classes. Those are made without their constructors, which want a tokenizer of Transformers and torchvision.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from bough.core.errors import RequestError
from bough.core.media import MediaKind
from bough.multimodal.decoding import Array, Clip
from bough.tokenizer.tokenizer import Tokenizer

# Whose arithmetic tells how many tokens an item has, and what prepares it where the checkpoint does not say.
PARTS = {
    "llava": ("LlavaProcessor", "CLIPImageProcessorPil"),
    "llava_next": ("LlavaNextProcessor", "LlavaNextImageProcessorPil"),
    "llava_onevision": ("LlavaOnevisionProcessor", "LlavaOnevisionImageProcessorPil"),
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLImageProcessorPil"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessorPil"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen2VLImageProcessorPil"),
    "gemma3": ("Gemma3Processor", "Gemma3ImageProcessorPil"),
    "idefics3": ("Idefics3Processor", "Idefics3ImageProcessorPil"),
    "smolvlm": ("Idefics3Processor", "SmolVLMImageProcessorPil"),
    "internvl": ("InternVLProcessor", "GotOcr2ImageProcessorPil"),
    "mistral3": ("ProcessorMixin", "PixtralImageProcessorPil"),
    "qwen2_audio": ("Qwen2AudioProcessor", "WhisperFeatureExtractor"),
}
UNUSED = {"rows", "cols", "num_crops", "num_patches"}  # of what image processors return: no encoder takes them
VIDEO_FRAMES = {"llava_onevision": 32, "internvl": 8}  # of a clip, where nobody says


class Result(msgspec.Struct):
    arrays: dict[str, Array]  # by the names of the encoder's arguments
    text: str
    grid: tuple[int, int, int] | None = None  # of the encoder's rows, in time, height and width (M-RoPE)
    interval: float = 1.0  # between two steps of time


class Family:
    def __init__(self, folder: Path, tokenizer: Tokenizer, options: dict[str, dict[str, Any]]) -> None:
        import transformers

        self._options = options
        self.config = config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        self.type: str = config.model_type
        cls, default = (getattr(transformers, name, None) for name in PARTS[self.type])
        given = _read_json(folder / "processor_config.json")
        files = {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}
        said = {kind: given.get(f"{kind}_processor") or _read_json(folder / name) for kind, name in files.items()}
        vision = getattr(config, "vision_config", None)
        if self.type == "qwen2_audio":
            extractor = given.get("feature_extractor") or said["image"]
            self.prepare = default(**extractor) if extractor else default(feature_size=config.audio_config.num_mel_bins)
        else:
            named = str(said["image"].pop("image_processor_type", "")).removesuffix("Fast")
            own = getattr(transformers, named.removesuffix("Pil") + "Pil", default) if named else default
            patches = {"patch_size": vision.patch_size, "merge_size": getattr(vision, "spatial_merge_size", 1)}
            patches |= {"temporal_patch_size": getattr(vision, "temporal_patch_size", 1)}
            usual = patches if self.type.startswith("qwen") else {}
            self.prepare = own(**{**usual, **said["image"], **options.get("image", {})})
        self._video = {**said["video"], **options.get("video", {})}

        def token(name: str, text: str = "") -> str:
            """As the configuration numbers it, else by its usual text."""
            ids = (getattr(config, f"{name}_token_{suffix}", None) for suffix in ("id", "index"))
            number = next((number for number in ids if number is not None), None)
            return text if number is None else tokenizer.token_text(number)

        # Which token stands for the rows of the encoder, and which for an item in a prompt.
        self.rows: dict[str, str] = {kind: token(kind) for kind in ("image", "video", "audio")}
        self.places = dict(self.rows)
        if self.type == "gemma3":
            self.places["image"] = token("boi")
        if self.type == "internvl":
            self.rows["video"], self.places["video"] = self.rows["image"], "<video>"
        if self.type == "mistral3":
            self._row_end, self._end = "[IMG_BREAK]", "[IMG_END]"
        self._attributes = {
            "image_processor": self.prepare,
            "video_processor": SimpleNamespace(**patches) if vision is not None else None,
            **{f"{kind}_token": place for kind, place in self.rows.items()},
            "fake_image_token": "<fake_token_around_image>",
            "global_image_tag": "<global-img>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "vision_start_token": token("vision_start", "<|vision_start|>"),
            "vision_end_token": token("vision_end", "<|vision_end|>"),
            **(_counts(config, vision) if vision is not None else {}),
        }
        self._attributes |= {name: value for name, value in given.items() if name in self._attributes and value}
        seats = self.rows["image"] * self._attributes.get("image_seq_length", 0)
        self._attributes["full_image_sequence"] = f"\n\n{token('boi')}{seats}{token('eoi')}\n\n"
        self._processor = cls.__new__(cls)
        self._processor.__dict__.update(self._attributes)
        self._defaults = dict(getattr(cls, "images_kwargs", {}))

    def image(self, image: Any, *, alone: bool) -> Result:
        """`alone`: there is no other image in the prompt, which matters to LLaVA-OneVision."""
        several = self.type == "llava_onevision" and not alone
        if self.type == "mistral3":
            self._defaults["patch_size"] = self._attributes["patch_size"] * self.config.spatial_merge_size
        inputs = self.prepare([[image, image]] if several else [image], return_tensors="np", **self._defaults)
        if self.type == "mistral3":
            height, width = (int(n) // self._defaults["patch_size"] for n in inputs["image_sizes"][0])
            text = (self.rows["image"] * width + self._row_end) * height
            text = text.removesuffix(self._row_end) + self._end
        else:
            text = self._processor.replace_image_token(inputs, 0)
        arrays = {name: np.asarray(value) for name, value in inputs.items() if name not in UNUSED}
        if several:
            arrays = {name: value if name == "batch_num_images" else value[:1] for name, value in arrays.items()}
        grid = arrays.get("image_grid_thw")
        return Result(arrays, text, None if grid is None else self._merged(grid[0]))

    def choose_frames(self, total: int, fps: float, asked: int | None) -> list[int]:
        """Which of so many frames are looked at, as Transformers samples them."""
        video, step = self._video, 2 if self.type.startswith("qwen2") else 1
        count = asked or self._options.get("video", {}).get("num_frames") or VIDEO_FRAMES.get(self.type)
        if count is None:
            most = min(video.get("max_frames", 768), total) // step * step
            count = min(max(total / fps * (video.get("fps") or 2), video.get("min_frames", 4)), most)
        count = max(int(min(count, total)) // step * step, 1)
        if self.type == "qwen3_vl":
            return [int(i) for i in np.linspace(0, total - 1, count).round()]
        return [int(i) for i in np.arange(0, total, total / count, dtype=np.float32)][:count]

    def fit_frame(self, count: int, height: int, width: int) -> tuple[int, int]:
        """The height and width in which so many frames are looked at; others than Qwen's are resized with the rest."""
        if not self.type.startswith("qwen"):
            return height, width
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_all

        factor = self.prepare.patch_size * self.prepare.merge_size
        size = {"shortest_edge": 128 * factor**2, "longest_edge": 768 * factor**2} | dict(self._video.get("size") or {})
        low = self._video.get("min_pixels") or size["shortest_edge"]
        high = self._video.get("max_pixels") or size["longest_edge"]
        limits = {"factor": factor, "min_pixels": low, "max_pixels": high}
        if self.type != "qwen3_vl":
            return smart_resize(height, width, **limits)  # type: ignore[no-any-return]
        step = self.prepare.temporal_patch_size
        return resize_all(max(count, step), height, width, temporal_factor=step, **limits)  # type: ignore[no-any-return]

    def video(self, clip: Clip) -> Result:
        from transformers.video_utils import VideoMetadata

        if self.type.startswith("qwen"):
            return self._qwen_video(clip, VideoMetadata(clip.total, clip.fps, frames_indices=list(clip.indices)))
        if self.type == "internvl":
            values = self.prepare(clip.frames, crop_to_patches=False, return_tensors="np")["pixel_values"]
            name = "pixel_values"
        else:
            from transformers import SiglipImageProcessorPil

            known = {key: self._video[key] for key in ("size", "image_mean", "image_std") if self._video.get(key)}
            usual = {"size": dict(self.prepare.size), "image_mean": self.prepare.image_mean}
            prepare = SiglipImageProcessorPil(**{**usual, "image_std": self.prepare.image_std, **known})
            values, name = prepare(clip.frames, return_tensors="np")["pixel_values"][None], "pixel_values_videos"
        frames = values if values.ndim == 5 else values[None]
        return Result({name: values}, self._processor.replace_video_token({"pixel_values_videos": frames}, 0))

    def _qwen_video(self, clip: Clip, metadata: Any) -> Result:
        """The image processor repeats each picture over a patch of time; here each frame gets its own part of it."""
        step = self.prepare.temporal_patch_size
        frames = clip.frames + clip.frames[-1:] * (-len(clip.frames) % step)
        inputs = self.prepare(frames, do_resize=False, return_tensors="np")
        _, height, width = inputs["image_grid_thw"][0]
        size = self.prepare.patch_size**2
        patches = inputs["pixel_values"].reshape(-1, step, height * width, 3, step, size)[..., 0, :]
        grid = np.array([[len(patches), height, width]])
        values = patches.transpose(0, 2, 3, 1, 4).reshape(-1, 3 * step * size)
        text = self._processor.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
        interval = 1.0
        if self.type == "qwen2_5_vl":
            interval = self.config.vision_config.tokens_per_second * step / metadata.sampled_fps
        seen = [1, height, width] if self.type == "qwen3_vl" else grid[0]  # timestamps stand between its frames
        arrays = {"pixel_values_videos": values, "video_grid_thw": grid}
        return Result(arrays, text, self._merged(seen), interval)

    @property
    def rate(self) -> int:
        return int(self.prepare.sampling_rate)

    def audio(self, samples: Array) -> Result:
        most = self.prepare.n_samples
        if len(samples) > most or not len(samples):
            raise RequestError(f"This model hears at most {most // self.rate} s of sound at a time; cut the recording.")
        options = {"sampling_rate": self.rate, "return_attention_mask": True, "padding": "max_length"}
        inputs = self.prepare(samples, return_tensors="np", **options)
        frames = int(inputs["attention_mask"].sum())
        arrays = {"input_features": inputs["input_features"], "feature_attention_mask": inputs["attention_mask"]}
        return Result(arrays, self.rows["audio"] * (((frames - 1) // 2 - 1) // 2 + 1))

    def _merged(self, grid: Any) -> tuple[int, int, int]:
        time, height, width = (int(n) for n in grid)
        return time, height // self.prepare.merge_size, width // self.prepare.merge_size


def place_of(family: Family, kind: MediaKind, tokenizer: Tokenizer) -> tuple[int, int]:
    """The token that stands for an item in a prompt, and the one that stands for a row of the encoder."""
    place, row = (tokenizer.encode(text, add_special_tokens=False) for text in (family.places[kind], family.rows[kind]))
    if len(place) != 1 or len(row) != 1:
        raise RequestError(f"The model's tokenizer has no token for {kind}s, so it takes none.")
    return place[0], row[0]


def _counts(config: Any, vision: Any) -> dict[str, Any]:
    """How many rows an image has, where the processor's own configuration does not say."""
    size = getattr(vision, "image_size", 0)
    size = size if isinstance(size, int) else size[0]
    patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    side = size // patch
    scale = getattr(config, "scale_factor", 1) if isinstance(getattr(config, "scale_factor", 1), int) else 1
    shrink = getattr(config, "downsample_ratio", 1.0)
    return {
        "patch_size": patch,
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", "full"),
        "num_additional_image_tokens": int(vision.model_type == "clip_vision_model"),
        "num_image_tokens": side**2,
        "vision_aspect_ratio": getattr(config, "vision_aspect_ratio", "anyres_max_9"),
        "image_seq_len": side**2 // scale**2,
        "image_seq_length": getattr(config, "mm_tokens_per_image", int(side**2 * shrink**2)),
    }


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}
