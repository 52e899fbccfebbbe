"""Command R: attention and MLP side by side after one layer norm, neighbours rotate, logits have a scale. Cohere 2 has
windows in most layers, and no rotation in the others."""

from collections.abc import Mapping
from typing import Any, ClassVar

from bough.core.errors import ModelError
from bough.models.family import ModelFamily, rotating_windows
from bough.models.fields import Fields


class Cohere(ModelFamily):
    pairs_apart = neighbours = True
    block_kind = "ParallelBlock"
    block_options: ClassVar[Mapping[str, Any]] = {"one_norm": True}

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.boolean("use_qk_norm"):
            raise ModelError(f"{config.where}: use_qk_norm is not supported; models without it are, as Command R is.")
        return {
            "norm": "layer",
            "norm_eps": config.number("layer_norm_eps", 1e-5),
            "logit_scale": config.number("logit_scale", 0.0625),
        }


class Cohere2(Cohere):
    def fields(self, config: Fields) -> dict[str, Any]:
        windows = rotating_windows(config, lambda layer: (layer + 1) % config.integer("sliding_window_pattern") != 0)
        return {**super().fields(config), **windows}
