"""The blocks that models are composed of, each holding this rank's share of its weights.

Layers are plain objects: they allocate their tensors when made, say through `slots` which tensors fill them, and are
called. They hold no state of a request; what a step needs comes with the forward context, which every layer gets.

`from bough import layers` loads no torch, so that a model file can be read without it; the first use of a layer does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bough.layers.everything import *  # noqa: F403  # for the type checker


def __getattr__(name: str) -> Any:
    import importlib

    return getattr(importlib.import_module("bough.layers.everything"), name)
