"""Encoders read nothing back from the device: what the host must know of an image follows from its size, which it has.

The device is simulated: tensors that were sent to it are of a class of their own, and so is all that is computed of
them. It refuses what would make the host wait.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy.typing as npt
import pytest
import torch
import transformers

from bough.core.plan import Encode
from bough.core.settings import Settings
from bough.executor import encoder
from bough.executor.load_model import load_model, resolve_config
from bough.loader import encoders
from bough.loader.locate import locate
from tests.executor.test_executor_encoder import plan
from tests.loader.test_loader_encoders import one_by_one
from tests.parity.test_media import make, text

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm_ocr")
READS = {"item", "tolist", "cpu", "numpy", "nonzero", "unique", "unique_consecutive", "masked_select", "masked_scatter"}
READS |= {"__bool__", "__int__", "__float__", "__index__"}
INDEXED = {"__getitem__", "__setitem__"}


class OnDevice(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, waits = getattr(func, "__name__", ""), False
        if name == "repeat_interleave":  # how long the result is
            waits = isinstance(args[1], torch.Tensor) and "output_size" not in (kwargs or {})
        elif name in INDEXED:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            tensors = [place for place in places if isinstance(place, torch.Tensor)]
            waits = any(place.dtype == torch.bool or not isinstance(place, OnDevice) for place in tensors)
        if waits or name in READS:
            raise AssertionError(f"{name} waits for the device")
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def sent(cls, values: torch.Tensor, device: object = None) -> Self:
        return values.as_subclass(cls)


def attend(*given: Any) -> torch.Tensor:
    """One item after the other, on plain tensors: how a kernel finds them is its own matter."""
    plain = [each.as_subclass(torch.Tensor) if isinstance(each, OnDevice) else each for each in given]
    return OnDevice.sent(one_by_one(*plain))


def to_device(array: npt.NDArray[Any]) -> torch.Tensor:
    return OnDevice.sent(torch.from_numpy(array))


def test_the_watch_notices_what_waits() -> None:
    numbers, host = OnDevice.sent(torch.arange(3)), torch.arange(3)
    mask, twice = numbers > 1, numbers * 2
    for wait in (
        lambda: int(twice.max()),
        lambda: twice.tolist(),
        lambda: twice[mask],
        lambda: twice[host],
        lambda: twice.repeat_interleave(numbers),
    ):
        with pytest.raises(AssertionError, match="waits for the device"):
            wait()
    assert torch.equal(twice[numbers].as_subclass(torch.Tensor), 2 * host)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_sizes_are_told_by_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    model = make(family, tmp_path)
    files, settings = locate(str(tmp_path)), Settings.from_flat({"dtype": "float32"})
    loaded = load_model(files, settings, resolve_config(files, settings), torch.device("cpu"))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend)  # imported late: it is slow
    for module in (encoder, encoders):
        monkeypatch.setattr(module, "sent", OnDevice.sent)
    transformers.AttentionInterface.register(encoders.PACKED, encoders.packed_attention)
    loaded.encoder.model.visual.config._attn_implementation = encoders.PACKED
    ours, images = encoder.make_encoder(loaded, to_device), model.case.images
    assert ours is not None
    ids, spans = model.prompt(text(9, 1), images)
    _, media = model.media(tmp_path, ids, spans, images)
    encodes = tuple(
        Encode(number, "image", item.count, item.features, item.file) for number, item in enumerate(media.items)
    )
    step, layout = plan([[0, 0, 0, 6], [6, 1, 1, 4]], encodes=encodes)
    found = ours.run(step, layout)
    assert found is not None and not ours.take_failed()
    values = found.rows.as_subclass(torch.Tensor)
    theirs = [model.theirs.get_image_features(**image.arrays, return_dict=True).pooler_output for image in images]
    expected = torch.cat([theirs[0][0][:6], theirs[1][0][1:5]])
    torch.testing.assert_close(values[0, 1:], expected, atol=1e-4, rtol=1e-4)
