"""Runs the encoders of a multi-modal model, and owns their outputs: what stands in the place of tokens of a prompt.

Items of one step that have the same shapes are computed together. Where an encoder fails for an item, its output is
not a number: the request that reads it fails like any whose logits are not finite, and no other does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bough.attention.context import MediaRows
from bough.attention.reading import ToDevice
from bough.core.media import Feature
from bough.core.model_config import MediaConfig
from bough.core.plan import BatchPlan, Encode, IntArray
from bough.executor.layout import StepLayout
from bough.executor.load_model import LoadedWeights
from bough.loader.encoders import PACKED, sent

log = logging.getLogger(__name__)

# What modules count with: reading it back would wait for the device.
ON_HOST = ("image_sizes", "batch_num_images", "num_local_patches", "image_grid_thw", "video_grid_thw")


def make_encoder(loaded: LoadedWeights, to_device: ToDevice = torch.from_numpy) -> Encoder | None:
    config, model = loaded.config, loaded.encoder
    if config.media is None and loaded.media_limits is not None:  # what prompts have in the place of tokens is as it is
        plain: Any = torch.nn.Linear(1, 1, bias=False, dtype=loaded.dtype, device=loaded.device)
        plain.get_embeds_features = lambda embeds: SimpleNamespace(pooler_output=embeds)
        return Encoder(plain, config.hidden_size, MediaConfig("", 0), to_device)
    return None if config.media is None else Encoder(model, config.hidden_size, config.media, to_device)


class Encoder:
    """`model` is Transformers', without its language model. Outputs have `width` numbers a row: the vectors in the
    place of tokens, and behind those what `deep_layers` are given."""

    def __init__(
        self, model: Any, hidden_size: int, media: MediaConfig, to_device: ToDevice = torch.from_numpy
    ) -> None:
        self._model, self._hidden_size, self._width = model, hidden_size, hidden_size * (1 + media.deep_layers)
        self._whole, self._to_device = media.whole, to_device
        weight = next(model.parameters())
        self._dtype, self._device = weight.dtype, weight.device
        visual: Any = getattr(getattr(model, "model", None), "visual", None)
        self.tower = visual if hasattr(visual, "blocks") and visual.config._attn_implementation == PACKED else None
        self._outputs: dict[int, torch.Tensor] = {}
        self._failed = list[int]()

    def run(self, plan: BatchPlan, layout: StepLayout) -> MediaRows | None:
        """Encodes what the plan asks for; what its tokens are replaced with, where some are."""
        for output in plan.dropped:
            del self._outputs[output]
        for _, alike in groupby(sorted(plan.encodes, key=_shape), key=_shape):
            self._encode(list(alike))
        if plan.media is None:
            return None
        rows = torch.cat([self._outputs[output][row : row + count] for _, output, row, count in plan.media.tolist()])
        here = np.zeros((int(layout.query_starts[-1]), 1), dtype=np.bool_)
        for first, count in _runs(plan, layout).tolist():
            here[first : first + count] = True
        spread = rows.new_empty(len(here), self._width).index_copy_(0, self._to_device(np.flatnonzero(here)), rows)
        return MediaRows(self._to_device(here), spread.view(len(here), -1, self._hidden_size).transpose(0, 1))

    def take_failed(self) -> tuple[int, ...]:
        """The outputs that could not be computed since the last call."""
        failed, self._failed = tuple(self._failed), []
        return failed

    def both_ways(self, plan: BatchPlan, layout: StepLayout) -> IntArray | None:
        """The tokens of items that attend to each other both ways. [runs, 2]"""
        return _runs(plan, layout) if self._whole and plan.media is not None else None

    def _encode(self, items: Sequence[Encode]) -> None:
        """Items of one kind and shape."""
        try:
            rows = self._call(items)
        except Exception as error:  # whatever an image may lead to concerns its request alone
            if len(items) > 1:
                for item in items:
                    self._encode([item])
                return
            log.error("the encoder failed for an item of %d tokens: %s", items[0].rows, error, exc_info=True)
            self._failed.append(items[0].output)
            rows = torch.full((items[0].rows, self._width), float("nan"), dtype=self._dtype, device=self._device)
        for item, part in zip(items, torch.split(rows, [item.rows for item in items]), strict=True):
            self._outputs[item.output] = part.clone() if len(items) > 1 else part

    def _call(self, items: Sequence[Encode]) -> torch.Tensor:
        count = sum(item.rows for item in items)
        if count == 1:  # Mistral 3 of Transformers squeezes the dimension of a lone row away
            items = [*items, *items]
        read = [read_features(item.features, item.file) for item in items]
        # MiniCPM-V's patches stand behind each other in the last dimension.
        packed = not {"target_sizes", "target_sizes_videos"}.isdisjoint(read[0])
        axes = {name: -1 if packed and name.startswith("pixel_values") else 0 for name in read[0]}
        joined = {name: np.concatenate([each[name] for each in read], axis) for name, axis in axes.items()}
        moved = {name: self._moved(name, torch.from_numpy(values)) for name, values in joined.items()}
        found = getattr(self._model, f"get_{items[0].kind}_features")(**moved)
        rows = [_rows(found.pooler_output), *map(_rows, getattr(found, "deepstack_features", None) or ())]
        output = torch.cat(rows, dim=1).to(self._dtype)
        expected = sum(item.rows for item in items), self._width
        if tuple(output.shape) != expected:
            raise ValueError(f"its output is {tuple(output.shape)}, the prompt has {expected}")
        return output[:count]

    def _moved(self, name: str, values: torch.Tensor) -> torch.Tensor:
        moved = values if name in ON_HOST else sent(values, self._device)
        return moved.to(self._dtype) if moved.is_floating_point() else moved


def read_features(features: Sequence[Feature], file: str) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays of an item, as they lie in its file."""
    content = np.memmap(file, dtype=np.uint8, mode="r")
    found = {}
    for feature in features:
        dtype = np.dtype(feature.dtype)
        end = feature.offset + dtype.itemsize * math.prod(feature.shape)
        found[feature.name] = np.frombuffer(content[feature.offset : end], dtype=dtype).reshape(feature.shape)
    return found


def _shape(item: Encode) -> tuple[object, ...]:
    """Equal of items that can be joined."""
    return (item.kind, *((feature.name, feature.dtype, feature.shape[1:]) for feature in item.features))


def _rows(found: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    parts = [found] if isinstance(found, torch.Tensor) else found
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _runs(plan: BatchPlan, layout: StepLayout) -> IntArray:
    """Where items stand among the tokens of the step, decodes first. [runs, 2]"""
    assert plan.media is not None
    decodes = int(layout.query_starts[int((plan.given < plan.query_lens).sum())])
    return plan.media[:, [0, 3]] + np.array([decodes, 0], dtype=np.int32)
