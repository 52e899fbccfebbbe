"""Where bytes come from, and what is refused on the way: files outside, private addresses, bombs, what is no media."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import socket
import struct
import threading
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from PIL import Image

from bough.core.errors import RequestError
from bough.core.media import MediaSource
from bough.multimodal.decoding import LOUDEST, Limits, decode_audio, decode_image, decode_video
from bough.multimodal.fetching import FetchRules, fetch, is_public, judge
from bough.multimodal.sources import as_source, read_columns, read_local

MOST = 1 << 20
LIMITS = Limits(pixels=10_000, seconds=2.0)
RULES = FetchRules((), MOST, 5.0)


def png(width: int = 8, height: int = 6) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 10, 30)).save(file, "PNG")
    return file.getvalue()


# ---- forms


def test_base64_in_its_forms() -> None:
    data = base64.b64encode(png()).decode()
    for text in (data, f"data:image/png;base64,{data}", data.rstrip("="), f"{data[:20]}\n{data[20:]}"):
        assert read_local(text, None, MOST) == png()
    assert read_local(base64.urlsafe_b64encode(b"\xff\xfe" * 30).decode(), None, MOST) == b"\xff\xfe" * 30
    for start in (b"\xff\xd8\xff\xe0 a small JPEG", b"\xff\xfb a small MP3"):  # which look like paths
        assert read_local(base64.b64encode(start).decode(), None, MOST) == start
    with pytest.raises(RequestError, match="base64"):
        read_local("data:image/png;base64,!!!", None, MOST)
    with pytest.raises(RequestError, match="larger than the 1 MiB"):
        read_local("A" * (2 * MOST), None, MOST)
    with pytest.raises(RequestError, match="larger than the 1 MiB"):
        read_local(bytes(MOST + 1), None, MOST)
    with pytest.raises(RequestError, match="ftp:// is not read"):
        read_local("ftp://example.org/a.png", None, MOST)


def test_lists_are_those_of_one_prompt_or_of_many() -> None:
    def contents(value: Any, count: int, many: bool) -> list[list[Any]]:
        return [[each.content for each in own] for own in read_columns({"image": value}, count, many)]

    assert contents("a", 1, False) == [["a"]]
    assert contents(["a", "b"], 1, False) == contents([["a", "b"]], 1, False) == [["a", "b"]]
    assert contents(None, 2, True) == contents([], 2, True) == [[], []]
    assert contents("a", 2, True) == [["a"], ["a"]]
    assert contents([["a", "b"], None], 2, True) == [["a", "b"], []]
    with pytest.raises(RequestError, match="image_data has 3 entries for 2 prompts"):
        contents(["a", "b", "c"], 2, True)
    nested: Any = "a"
    for _ in range(900):
        nested = [nested]
    with pytest.raises(RequestError, match="image_data has lists in more than 8 others"):
        contents(nested, 1, False)


def test_objects_of_the_caller() -> None:
    import torch

    pixels = np.random.default_rng(0).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    forms = [Image.fromarray(pixels), pixels, torch.tensor(pixels), torch.tensor(pixels).permute(2, 0, 1)]
    for form in (*forms, torch.tensor(pixels).float() / 255, Image.fromarray(pixels).convert("RGBA")):
        content = as_source("image", form).content
        assert isinstance(content, bytes)
        np.testing.assert_array_equal(np.asarray(decode_image(content, LIMITS, None)), pixels)
    for other in (np.zeros((6, 8, 4), np.uint8), np.zeros((2, 6, 8), np.uint8)):
        content = as_source("image", other).content
        assert isinstance(content, bytes)
        with pytest.raises(RequestError, match="1 or 3 channels are needed"):
            decode_image(content, LIMITS, None)
    source = as_source("video", {"path": "film.mp4", "num_frames": 4})
    assert source == MediaSource("video", "film.mp4", None, 4)
    for wrong in (3, {}, {"path": "x", "num_frames": 0}, {"path": "x", "num_frames": True}, ""):
        with pytest.raises(RequestError, match="video_data"):
            as_source("video", wrong)


# ---- files


def test_files_only_below_the_folder(tmp_path: Path) -> None:
    home, outside = tmp_path / "home", tmp_path / "secret.png"
    home.mkdir()
    outside.write_bytes(png())
    (home / "a.png").write_bytes(png())
    (home / "link.png").symlink_to(outside)
    (home / "inside.png").symlink_to(home / "a.png")
    (home / "folder").symlink_to(tmp_path)
    os.mkfifo(home / "pipe.png")
    root = str(home)
    for name in ("a.png", f"{home}/a.png", f"file://{home}/a.png", "./a.png", "inside.png"):
        assert read_local(name, root, MOST) == png()
    escapes = [
        "../secret.png",
        str(outside),
        f"file://{outside}",
        "link.png",
        "folder/secret.png",
        "pipe.png",
        "none.png",
    ]
    for name in (*escapes, f"file://{home}/%2e%2e/secret.png", "/proc/self/environ.", "."):
        with pytest.raises(RequestError, match="no such file below"):
            read_local(name, root, MOST)
    with pytest.raises(RequestError, match="--allowed-local-media-path FOLDER"):
        read_local(str(outside), None, MOST)


# ---- URLs


async def body(content: bytes) -> AsyncIterator[bytes]:
    yield content


def fetched(url: str, rules: FetchRules = RULES, answer: Any = None) -> bytes:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return (
            answer(request)
            if answer
            else httpx.Response(200, content=body(png()), headers={"content-type": "image/png"})
        )

    try:
        return asyncio.run(fetch(url, rules, httpx.MockTransport(handle)))
    finally:
        fetched.seen = seen  # type: ignore[attr-defined]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names resolve to."""
    known: dict[str, list[str]] = {"good.example": ["93.184.216.34"]}
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host in known:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 0)) for address in known[host]]
        return real(host, port, *args[:3], flags=socket.AI_NUMERICHOST)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


PRIVATE = [
    "127.0.0.1", "[::1]", "169.254.169.254", "10.1.2.3", "192.168.0.1", "0.0.0.0", "[fe80::1]", "[fd00::1]",
    "100.64.0.1", "[::ffff:127.0.0.1]", "[64:ff9b::a9fe:a9fe]", "[2002:7f00:1::]", "224.0.0.1", "2130706433", "0x7f.1",
    "[::127.0.0.1]", "[::ffff:0:127.0.0.1]", "[64:ff9b:1::7f00:1]", "[fec0::1]", "192.0.0.192", "168.63.129.16",
    "[::ffff:168.63.129.16]",
]  # fmt: skip


def test_names_that_resolve_slowly_hold_up_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def never(*_: Any, **__: Any) -> Any:
        release.wait(60)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", never)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        waiting = [asyncio.create_task(judge(httpx.URL(f"http://slow{i}.example/"), RULES)) for i in range(4)]
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(asyncio.to_thread(int), 30)
        finally:
            release.set()
        assert all("no host" in str(each) for each in await asyncio.gather(*waiting, return_exceptions=True))

    asyncio.run(run())


@pytest.mark.parametrize("host", PRIVATE)
def test_private_addresses_are_not_reached(host: str, names: dict[str, list[str]]) -> None:
    with pytest.raises(RequestError, match=r"private address|no host|cannot be fetched"):
        fetched(f"http://{host}/latest/meta-data")
    assert not fetched.seen  # type: ignore[attr-defined]


def test_names_are_judged_by_what_they_resolve_to(names: dict[str, list[str]]) -> None:
    names["rebound.example"] = ["93.184.216.34", "10.0.0.5"]
    with pytest.raises(RequestError, match=r"rebound\.example has a private address"):
        fetched("https://rebound.example/a.png")
    assert fetched("https://good.example:8443/a.png?x=1") == png()
    (request,) = fetched.seen  # type: ignore[attr-defined]
    assert str(request.url) == "https://93.184.216.34:8443/a.png?x=1"  # what was judged is what is connected to
    assert request.headers["host"] == "good.example:8443"
    assert request.extensions["sni_hostname"] == "good.example"
    names["inner.example"] = ["10.0.0.5"]
    listed = RULES._replace(domains=["inner.example"])
    assert fetched("http://inner.example/a.png", listed) == png()
    with pytest.raises(RequestError, match=r"not fetched from good\.example"):
        fetched("http://good.example/a.png", listed)


@pytest.mark.parametrize("target", ["http://127.0.0.1/", "http://inner.example/", "file:///etc/passwd", "//[::1]/x"])
def test_redirects_are_judged_again(target: str, names: dict[str, list[str]]) -> None:
    names["inner.example"] = ["10.0.0.5"]
    with pytest.raises(RequestError, match=r"private address|http and https"):
        fetched("http://good.example/a", RULES, lambda request: httpx.Response(302, headers={"location": target}))
    assert len(fetched.seen) == 1  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="leads on more than 5 times"):
        fetched("http://good.example/a", RULES, lambda request: httpx.Response(302, headers={"location": "/a"}))


def test_answers_have_limits(names: dict[str, list[str]]) -> None:
    def answer(**given: Any) -> Any:
        return lambda request: httpx.Response(**{"status_code": 200, **given})

    url = "http://good.example/a"
    with pytest.raises(RequestError, match="larger than the 1 MiB"):
        fetched(url, RULES, answer(content=body(bytes(MOST + 1)), headers={"content-type": "image/png"}))
    with pytest.raises(RequestError, match=r"text/html.*, which is no media"):
        fetched(url, RULES, answer(content=body(b"<html>"), headers={"content-type": "text/html; charset=utf-8"}))
    with pytest.raises(RequestError, match="answers 404"):
        fetched(url, RULES, answer(status_code=404))

    async def slow() -> bytes:
        async def wait(request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

        return await fetch(url, RULES._replace(timeout_s=0.05), httpx.MockTransport(wait))

    with pytest.raises(RequestError, match=r"longer than 0.05 s"):
        asyncio.run(slow())
    for wrong in ("http://", "http://[bad/", "https://exa mple/"):
        with pytest.raises(RequestError):
            fetched(wrong)


def test_public_addresses_are_public() -> None:
    assert all(map(is_public, ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34"]))


# ---- decoding


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_a_bomb_is_refused_by_its_header() -> None:
    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))
    with pytest.raises(RequestError, match=r"50000 x 50000 pixels; from 1 to 10000 are taken \(--mm-max-pixels\)"):
        decode_image(bomb, LIMITS, None)


@pytest.mark.parametrize(
    "content",
    [png()[:40], png()[:-30], b"hello", b"", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\x93NUMPY\x01\x00", b"<svg></svg>"],
    ids=["header", "data", "text", "empty", "eps", "array", "svg"],
)
def test_what_is_no_image_is_said_to_be_none(content: bytes) -> None:
    for decode in (
        lambda: decode_image(content, LIMITS, None),
        lambda: decode_video(content, LIMITS, lambda total, fps: [0], lambda *size: (2, 2)),
        lambda: decode_audio(content, LIMITS, 16000),
    ):
        with pytest.raises(RequestError, match="cannot be decoded"):
            decode()


def test_objects_are_not_unpickled() -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(RequestError, match="cannot be decoded"):
        decode_audio(file.getvalue(), LIMITS, 16000)


def test_low_detail_is_small_and_orientation_is_kept() -> None:
    assert decode_image(png(100, 50), LIMITS, "low").size == (100, 50)
    assert decode_image(png(2000, 1000), Limits(10**7, 1.0), "low").size == (512, 256)
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # turned
    Image.new("RGB", (8, 6)).save(file, "JPEG", exif=exif)
    assert decode_image(file.getvalue(), LIMITS, None).size == (6, 8)


def film(frames: int, container: str = "mp4", codec: str = "mpeg4", size: tuple[int, int] = (32, 32)) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=10)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            pixels = np.full((size[1], size[0], 3), number * 12, dtype=np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi"])  # the second does not say how many frames it has
def test_frames_are_those_that_were_chosen(container: str) -> None:
    told: list[tuple[int, float]] = []

    def choose(total: int, fps: float) -> list[int]:
        told.append((total, fps))
        return [0, 9, 18]

    clip = decode_video(film(20, container), LIMITS, choose, lambda count, height, width: (16, 24))
    assert told == [(20, 10.0)] and clip.total == 20 and clip.indices == [0, 9, 18]
    assert [frame.shape for frame in clip.frames] == [(16, 24, 3)] * 3
    assert [round(float(frame.mean()) / 12) for frame in clip.frames] == [0, 9, 18]


def test_clips_and_recordings_have_limits() -> None:
    def decode(content: bytes, limits: Limits) -> None:
        decode_video(content, limits, lambda total, fps: [0], lambda *size: (2, 2))

    with pytest.raises(RequestError, match=r"at most 1 s are taken \(--mm-max-seconds\)"):
        decode(film(20), Limits(10_000, 1.0))
    with pytest.raises(RequestError, match="32 x 32 pixels"):
        decode(film(2), Limits(1000, 10.0))
    with pytest.raises(RequestError, match="at most 2 s"):
        decode_audio(recording(3.0), LIMITS, 16000)
    with pytest.raises(RequestError, match="cannot be decoded"):
        decode(film(20)[:200], LIMITS)


def test_a_playlist_opens_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(film(5))
    lists = [
        f"#EXTM3U\n#EXTINF:1,\nfile://{tmp_path}/a.mp4\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile {tmp_path}/a.mp4\n",
    ]
    for text in lists:
        with pytest.raises(RequestError, match="cannot be decoded"):
            decode_video(text.encode(), LIMITS, lambda total, fps: [0], lambda *size: (2, 2))


def recording(seconds: float, rate: int = 8000) -> bytes:
    import wave

    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setnchannels(2)
        output.setsampwidth(2)
        output.setframerate(rate)
        tone = (np.sin(np.arange(int(rate * seconds)) * 2 * np.pi * 440 / rate) * 16000).astype("<i2")
        output.writeframes(np.repeat(tone, 2).tobytes())
    return file.getvalue()


def test_sound_comes_in_one_channel_at_the_models_rate() -> None:
    samples = decode_audio(recording(1.0), LIMITS, 16000)
    assert abs(len(samples) - 16000) < 50 and samples.dtype == np.float32
    spectrum = np.abs(np.fft.rfft(samples))
    assert abs(int(spectrum.argmax()) * 16000 / len(samples) - 440) < 2
    assert 0.4 < np.abs(samples).max() < 0.6


def test_numbers_that_are_none_are_no_numbers_of_a_sound() -> None:
    """Its features would be infinite, and the model's numbers too."""
    samples = np.array([np.nan, np.inf, -np.inf, 1e38, 0.5] * 100, dtype=np.float32)
    array = io.BytesIO()
    np.save(array, samples)
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format="WAV", subtype="FLOAT")
    for content in (file.getvalue(), array.getvalue()):
        heard = decode_audio(content, LIMITS, 16000)
        assert heard[:5].tolist() == [0.0, LOUDEST, -LOUDEST, LOUDEST, 0.5]
        assert np.isfinite(np.fft.rfft(heard[:400]) ** 2).all()


def test_cameras_pictures_are_decoded() -> None:
    """Several views in one file (MPO), which begins like any JPEG; and the colours of printers."""
    first, second = (Image.new("RGB", (8, 6), colour) for colour in ("red", "blue"))
    for image, form, options in ((first, "MPO", {"save_all": True, "append_images": [second]}), (first, "JPEG", {})):
        file = io.BytesIO()
        image.save(file, form, **options)
        assert np.asarray(decode_image(file.getvalue(), LIMITS, None))[0, 0, 0] > 250
    file = io.BytesIO()
    first.convert("CMYK").save(file, "JPEG")
    assert decode_image(file.getvalue(), LIMITS, None).mode == "RGB"
    with pytest.raises(RequestError, match="UnidentifiedImageError"):
        decode_image(bytes(range(64)), LIMITS, None)
