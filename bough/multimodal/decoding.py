"""Bytes to pixels and samples, in a worker process. What is too large is refused by its header, before decoding."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bough.core.errors import RequestError

# Formats that decode from bytes alone; others start programs (EPS) or are read by few. MPO is found by JPEG's plugin.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
# Containers that hold their streams themselves: playlists would have FFmpeg open whatever they name.
CONTAINERS = "mov,mp4,m4a,matroska,webm,avi,flv,mpegts,mpeg,ogg,gif,wav,flac,mp3,aac,aiff,w64,caf,asf,amr,au"
LOW_DETAIL = 512  # pixels of the longer side
NUMPY = b"\x93NUMPY"
ARRAY_FPS = 24.0  # of frames in an array
LOUDEST = 1e6  # of a sample; the squares of what a file may have beyond are infinite
Array = npt.NDArray[Any]


class Limits(msgspec.Struct, frozen=True):
    pixels: int
    seconds: float

    def check_pixels(self, width: int, height: int) -> None:
        if not 0 < width * height <= self.pixels:
            most = f"from 1 to {self.pixels} are taken (--mm-max-pixels)"
            raise RequestError(f"There is a picture of {width} x {height} pixels; {most}. Send a smaller one.")

    def check_seconds(self, seconds: float) -> None:
        if seconds > self.seconds:
            most = f"at most {self.seconds:g} s are taken (--mm-max-seconds)"
            raise RequestError(f"It lasts {seconds:.0f} s or more; {most}. Cut it.")


class Clip(msgspec.Struct):
    frames: list[Array]  # [height, width, 3]
    indices: list[int]  # of the frames in the whole
    total: int
    fps: float


def decode_image(content: bytes, limits: Limits, detail: str | None) -> Any:
    """A Pillow image in RGB, upright."""
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = None  # the limit is ours
    with _reading("image", "PNG, JPEG, WebP, GIF, BMP, TIFF or AVIF"):
        if content.startswith(NUMPY):
            image = Image.fromarray(_to_pixels(_read_array(content, 3), limits))
        else:
            image = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
            limits.check_pixels(*image.size)
            image = ImageOps.exif_transpose(image).convert("RGB")
    if detail == "low":
        image.thumbnail((LOW_DETAIL, LOW_DETAIL))
    return image


def decode_video(
    content: bytes,
    limits: Limits,
    choose: Callable[[int, float], list[int]],
    fit: Callable[[int, int, int], tuple[int, int]],
) -> Clip:
    """The frames that `choose` picks by their count and rate, in the height and width that `fit` gives them by their
    count, height and width: all of them in their own size may not fit in memory."""
    from PIL import Image

    def fitted(frame: Array) -> Array:
        height, width = fit(len(indices), *frame.shape[:2])
        return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))

    with _reading("video", "MP4, WebM, Matroska, AVI or GIF"):
        if content.startswith(NUMPY):
            array = _read_array(content, 4)
            indices = choose(len(array), ARRAY_FPS)
            frames = [fitted(_to_pixels(array[i], limits)) for i in indices]
            return Clip(frames, indices, len(array), ARRAY_FPS)
        with open_container(content) as container:
            stream = container.streams.video[0]
            limits.check_pixels(stream.width, stream.height)
            fps = float(stream.average_rate or ARRAY_FPS)
            total = stream.frames
            if not total:  # its header does not say
                total = sum(packet.size > 0 for packet in container.demux(stream))
                container.seek(0)
            limits.check_seconds(total / fps)
            indices, found = choose(total, fps), {}
            for number, frame in zip(range(indices[-1] + 1), container.decode(stream), strict=False):
                limits.check_pixels(frame.width, frame.height)
                if number in indices:
                    found[number] = fitted(frame.to_ndarray(format="rgb24"))
        last = found[max(found)]  # a header may promise more frames than there are
        return Clip([found.get(i, last) for i in indices], indices, total, fps)


def decode_audio(content: bytes, limits: Limits, rate: int) -> Array:
    """One channel at the model's rate; arrays have it already."""
    with _reading("recording", "WAV, FLAC, MP3, OGG or M4A"):
        if content.startswith(NUMPY):
            samples = np.nan_to_num(_read_array(content, 1).astype(np.float32)).clip(-LOUDEST, LOUDEST)
            limits.check_seconds(len(samples) / rate)
            return samples
        return np.concatenate([*samples_of(content, rate, limits.check_seconds)])


def samples_of(content: bytes, rate: int, check_seconds: Callable[[float], None]) -> Iterator[Array]:
    """Pieces of one channel; what they last together is checked before each. Without a sound there is none."""
    import av

    with open_container(content) as container:
        # From 19 on it has a thread for each core, which outlast the file, in a process whose memory is bounded.
        more = {"threads": 1} if _is_19(av) else {}
        resampler, length = av.AudioResampler(format="fltp", rate=rate, **more), 0
        frames = container.decode(container.streams.audio[0]) if container.streams.audio else ()
        for frame in chain(frames, [None]):  # the last lets the resampler give what it holds
            for piece in resampler.resample(frame):
                length += piece.samples
                check_seconds(length / rate)
                yield np.nan_to_num(piece.to_ndarray().mean(axis=0)).clip(-LOUDEST, LOUDEST)


def open_container(content: bytes) -> Any:
    import av

    av.logging.set_level(av.logging.PANIC)
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
    # From 19 on no bytes in a title are an error, and there is no such option.
    more = {} if _is_19(av) else {"metadata_errors": "replace"}
    return av.open(io.BytesIO(content), container_options=options, **more)


def _is_19(av: Any) -> bool:
    return int(av.__version__.partition(".")[0]) >= 19


@contextmanager
def _reading(what: str, formats: str) -> Iterator[None]:
    try:
        yield
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  (decoders raise whatever they like on bytes that are not theirs)
        reason = f"{type(error).__name__}: {error}".partition("<_io")[0].rstrip(" :.")
        raise RequestError(
            f"The {what} cannot be decoded ({reason}): it is damaged, cut short, or not {formats}."
        ) from None


def _read_array(content: bytes, dimensions: int) -> Array:
    array: Array = np.load(io.BytesIO(content), allow_pickle=False)
    if array.ndim != dimensions or not array.size or array.dtype.kind not in "uif":
        raise ValueError(f"it has the shape {array.shape} and holds {array.dtype}; {dimensions} dimensions are needed")
    return array


def _to_pixels(array: Array, limits: Limits) -> Array:
    """[height, width, 3] in bytes; channels may come first, and numbers between 0 and 1."""
    if array.shape[0] in (1, 3) and array.shape[-1] not in (1, 3):
        array = np.moveaxis(array, 0, -1)
    if array.shape[-1] not in (1, 3):
        raise ValueError(f"it has the shape {array.shape}; 1 or 3 channels are needed, first or last")
    limits.check_pixels(array.shape[1], array.shape[0])
    scale = 255 if array.dtype.kind == "f" and array.max() <= 1 else 1
    array = (np.nan_to_num(array) * scale).clip(0, 255).round().astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))
