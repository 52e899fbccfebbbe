"""Logit processors that users write: code that a request brings along, run on its logits before a token is drawn.

A processor is a class; its text (`to_str`) holds the class itself, so that a client may send one that the engine has
never seen. Unpacking and calling it runs whatever it contains: engines refuse processors unless they were started with
`--enable-custom-logit-processor` (see `core/custom_code`). What goes wrong in one by accident harms the request that
brought it, and no other.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bough.core.custom_code import load_dill
from bough.core.errors import RequestError

log = logging.getLogger(__name__)

Processor = Callable[[Tensor, list[dict[str, Any]]], Tensor]


class CustomLogitProcessor(ABC):
    """Subclass it, and send `YourClass.to_str()` as `custom_logit_processor`."""

    @abstractmethod
    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        """The logits [rows, vocabulary] to sample from, of the requests with this processor; `custom_param_list` has
        each one's `custom_params`. May change and return what it was given."""

    @classmethod
    def to_str(cls) -> str:
        return json.dumps({"callable": load_dill().dumps(cls, recurse=True).hex()})


@lru_cache(maxsize=64)
def load_processor(text: str) -> Processor:
    """The processor of a request; a `RequestError` where its text holds none."""
    dill = load_dill()
    try:
        made = dill.loads(bytes.fromhex(json.loads(text)["callable"]))()
    except Exception as error:  # noqa: BLE001  (it is somebody else's code: anything may come)
        raise RequestError(
            f"custom_logit_processor cannot be unpacked ({type(error).__name__}: {error}); send the text that "
            "CustomLogitProcessor.to_str() made, of a class whose imports the engine has too.",
            field="custom_logit_processor",
        ) from None
    if not callable(made):
        text = "custom_logit_processor must be a class whose objects can be called."
        raise RequestError(text, field="custom_logit_processor")
    processor: Processor = made
    return processor


def run_processor(processor: Processor, logits: Tensor, params: Sequence[dict[str, Any]]) -> Tensor:
    """What the processor makes of some rows; NaN, which fails them, where it cannot."""
    try:
        processed = processor(logits, list(params))
        if processed.shape != logits.shape:
            raise ValueError(f"it returned {tuple(processed.shape)} for logits {tuple(logits.shape)}")
        return processed.to(logits.dtype)
    except Exception:
        log.exception("a custom logit processor failed; so do the requests that brought it")
        return torch.full_like(logits, torch.nan)
