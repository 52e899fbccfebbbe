"""Bytes to pixels and samples, in a worker process. What is too large is refused by its header, before it is decoded."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bough.core.errors import RequestError

# Formats that decode from bytes alone; others start programs (EPS) or are read by few.
IMAGE_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
# Containers that hold their streams themselves: playlists would have FFmpeg open whatever they name.
CONTAINERS = "mov,mp4,m4a,matroska,webm,avi,flv,mpegts,mpeg,ogg,gif,wav,flac,mp3,aac,aiff,w64,caf,asf,amr"
LOW_DETAIL = 512  # pixels of the longer side
NUMPY = b"\x93NUMPY"
Array = npt.NDArray[Any]


class Limits(msgspec.Struct, frozen=True):
    pixels: int
    seconds: float


class Clip(msgspec.Struct):
    frames: list[Array]  # [height, width, 3]
    indices: list[int]  # of the frames in the whole
    total: int
    fps: float


def decode_image(content: bytes, limits: Limits, detail: str | None) -> Any:
    """A Pillow image in RGB, upright."""
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = limits.pixels  # what a file holds beside its first picture is bounded too
    if content.startswith(NUMPY):
        image = Image.fromarray(_to_pixels(_read_array(content, limits, 3)))
    else:
        with _reading("image", "PNG, JPEG, WebP, GIF, BMP, TIFF or AVIF"):
            image = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
            _check_pixels(*image.size, limits)
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
    count, height and width; they are made smaller as they come, because all of them may not fit in memory."""
    from PIL import Image

    def fitted(frame: Array) -> Array:
        height, width = fit(len(indices), *frame.shape[:2])
        if frame.shape[:2] == (height, width):
            return frame
        return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))

    if content.startswith(NUMPY):
        frames = _read_array(content, limits, 4)
        indices = choose(len(frames), 24.0)
        return Clip([fitted(_to_pixels(frames[i])) for i in indices], indices, len(frames), 24.0)
    with _reading("video", "MP4, WebM, Matroska, AVI or GIF"), _open(content) as container:
        stream = next(iter(container.streams.video), None)
        if stream is None:
            raise RequestError("The video has no pictures in it; send sound as audio.")
        _check_pixels(stream.width, stream.height, limits)
        fps = float(stream.average_rate or 24)
        total = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        _check_seconds(total / fps, limits)
        indices = choose(total, fps)
        if not stream.frames:
            container.seek(0)
        wanted, found = set(indices), {}
        for number, frame in enumerate(container.decode(stream)):
            _check_pixels(frame.width, frame.height, limits)
            if number in wanted:
                found[number] = fitted(frame.to_ndarray(format="rgb24"))
            if number >= indices[-1]:
                break
        if not found:
            raise RequestError("No frame of the video can be decoded; it is cut short or damaged.")
        last = max(found)  # a container may promise more frames than it has
        return Clip([found.get(i, found[last]) for i in indices], indices, total, fps)


def decode_audio(content: bytes, limits: Limits, rate: int) -> npt.NDArray[np.float32]:
    """One channel at the model's rate; arrays have it already."""
    if content.startswith(NUMPY):
        samples = _read_array(content, limits, 1).astype(np.float32)
        _check_seconds(len(samples) / rate, limits)
        return samples
    with _reading("recording", "WAV, FLAC, MP3, OGG or M4A"), _open(content) as container:
        import av

        stream = next(iter(container.streams.audio), None)
        if stream is None:
            raise RequestError("There is no sound in the recording.")
        _check_seconds(float((stream.duration or 0) * (stream.time_base or 0)), limits)
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        pieces, count = [], 0
        for frame in (*container.decode(stream), None):
            for piece in resampler.resample(frame):
                pieces.append(piece.to_ndarray()[0])
                count += piece.samples
            _check_seconds(count / rate, limits)
        return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


def _open(content: bytes) -> Any:
    import av

    av.logging.set_level(av.logging.PANIC)
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
    return av.open(io.BytesIO(content), container_options=options, metadata_errors="replace")


@contextmanager
def _reading(what: str, formats: str) -> Iterator[None]:
    try:
        yield
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # decoders raise whatever they like on bytes that are not theirs
        reason = str(error).split("<_io")[0].strip().rstrip(".:") or type(error).__name__
        raise RequestError(
            f"The {what} cannot be decoded ({reason}): it is damaged, cut short, or not {formats}."
        ) from None


def _check_pixels(width: int, height: int, limits: Limits) -> None:
    if width * height > limits.pixels:
        raise RequestError(
            f"A picture of {width} x {height} pixels is more than the {limits.pixels} that are taken (--mm-max-pixels); "
            "send a smaller one."
        )
    if not width or not height:
        raise RequestError("The picture has no pixels.")


def _check_seconds(seconds: float, limits: Limits) -> None:
    if seconds > limits.seconds:
        raise RequestError(
            f"It lasts {seconds:.0f} s or more, and at most {limits.seconds:g} s are taken (--mm-max-seconds); cut it."
        )


def _read_array(content: bytes, limits: Limits, dimensions: int) -> Array:
    with _reading("array", "a NumPy array"):
        array: Array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
        if array.ndim != dimensions or not array.size or array.dtype.kind not in "uif":
            raise ValueError(f"its shape is {array.shape} and its type {array.dtype}, and {dimensions} dimensions are needed")
    if dimensions > 1:
        _check_pixels(array[..., 0].size // (len(array) if dimensions == 4 else 1), 1, limits)
    return array


def _to_pixels(array: Array) -> Array:
    """[height, width, 3] in bytes; channels may come first, and numbers between 0 and 1."""
    if array.shape[0] in (1, 3) and array.shape[-1] not in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.dtype.kind == "f":
        array = array * 255 if array.max() <= 1 else array
    array = array.clip(0, 255).round().astype(np.uint8)[..., :3]
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))
