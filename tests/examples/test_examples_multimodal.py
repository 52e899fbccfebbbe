"""The examples with a picture, which others can read, and with a clip: both reach the server."""

from __future__ import annotations

import base64
import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.lang.test_lang_endpoint import native

FOLDER = Path(__file__).parents[2] / "examples" / "multimodal"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> Any:
    return load("describe_picture")


def test_the_picture_is_a_disc(example: Any) -> None:
    picture = Image.open(io.BytesIO(example.disc()))
    assert picture.size == (96, 96) and picture.mode == "RGB"
    assert picture.getpixel((48, 48)) == (208, 32, 32) and picture.getpixel((2, 2)) == (255, 255, 255)


def test_the_picture_is_sent(example: Any) -> None:
    with native() as server:
        assert example.main(server.url)
        (body,) = [body for path, body, _ in server.asked if path == "/generate"]
    assert body["image_data"] == [f"data:image/png;base64,{base64.b64encode(example.disc()).decode()}"]
    assert "<image>What shape" in body["text"]


def test_the_clip_is_sent(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    with native() as server:
        assert load("describe_clip").main(str(tmp_path / "clip.mp4"), server.url)
        (body,) = [body for path, body, _ in server.asked if path == "/generate"]
    data = base64.b64encode((tmp_path / "clip.mp4").read_bytes()).decode()
    assert body["video_data"] == [{"url": f"data:video/mp4;base64,{data}", "num_frames": 8}]
    assert "<video>What happens" in body["text"]
