from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.core.errors import ModelError
from bough.loader.gguf_file import GgufArray, GgufFile

EXTRA = {
    "a.text": "grüße",
    "a.number": 7,
    "a.fraction": 0.5,
    "a.flag": True,
    "a.words": ["x", "", "ŷ" * 40],
    "a.numbers": [1, -2, 3],
    "a.fractions": [0.5, 0.25],
    "a.flags": [True, False],
}


def test_metadata_and_tensors_match_the_package_s_reader(make_gguf: Callable[..., Path]) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = make_gguf(extra=EXTRA, tensors={"m": values, "v": np.ones(5, np.float32)})
    file, reference = GgufFile.open(path), gguf.GGUFReader(path)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            found = file.metadata[key]
            assert (found.values() if isinstance(found, GgufArray) else found) == field.contents(), key
    for tensor in reference.tensors:
        info = file.tensors[tensor.name]
        assert (info.start, info.nbytes, info.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
    assert file.tensors["m"].shape == (2, 3)
    np.testing.assert_array_equal(file.raw(file.tensors["m"]).view(np.float32), values)
    assert file.raw(file.tensors["v"]).shape == (1, 20)


def test_a_string_is_found_as_decoding_all_would_find_it(make_gguf: Callable[..., Path]) -> None:
    inside = (3).to_bytes(8, "little").decode() + "end"  # looks like the entry of another string
    words = ["x", inside, "", "end", "ŷ" * 40, "end"]
    metadata = GgufFile.open(make_gguf(extra={"a.words": words, "a.numbers": [1, 2]})).metadata
    found, numbers = metadata["a.words"], metadata["a.numbers"]
    assert isinstance(found, GgufArray) and isinstance(numbers, GgufArray)
    assert [found.find(word) for word in words] == [words.index(word) for word in words]
    assert found.find("en") is None and found.find("missing") is None and numbers.find("x") is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b"GG", "cut short"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + b"\x01\x00\x00\x00" + bytes(100), "GGUF version 1 "),
        (b"GGUF" + b"\x00\x00\x00\x03" + bytes(100), "or big-endian"),
        (b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 100, "cut short"),
    ],
)
def test_files_that_are_no_gguf(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=text) as caught:
        GgufFile.open(path)
    assert str(path) in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Cannot read .*none\.gguf: No such file"):
        GgufFile.open(tmp_path / "none.gguf")


def test_tensor_beyond_the_end_is_found_when_opening(make_gguf: Callable[..., Path]) -> None:
    path = make_gguf(tensors={"first": np.zeros(64, np.float32), "last": np.zeros(64, np.float32)})
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ModelError, match=r"cut short: .* tensor 'last' ends at byte"):
        GgufFile.open(path)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_escapes_as_another_error(make_gguf: Callable[..., Path], data: st.DataObject) -> None:
    """Whatever a bit flip or a cut does to the header, the answer is a file or a ModelError."""
    path = make_gguf(extra=EXTRA, tensors={"m": np.zeros((2, 32), np.float32)})
    content = bytearray(path.read_bytes())
    cut = data.draw(st.integers(0, len(content)))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(0, 255))
    path.write_bytes(content[:cut] if data.draw(st.booleans()) else content)
    try:
        file = GgufFile.open(path)
    except ModelError:
        return
    for value in file.metadata.values():
        if isinstance(value, GgufArray):
            value.values()
    for info in file.tensors.values():
        file.raw(info)
