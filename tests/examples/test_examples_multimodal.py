"""The example with a picture: it is one that others can read, and it reaches the server."""

from __future__ import annotations

import base64
import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.lang.test_lang_endpoint import native

PATH = Path(__file__).parents[2] / "examples" / "multimodal" / "describe_picture.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("describe_picture", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
