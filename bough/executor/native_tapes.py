"""The tapes of one model, with the memory they work in: what a native executor runs.

There are three: a step whose last tokens are asked for, with their logits; a step of which all hidden states are asked
for; and the logits of hidden states alone. They hold the addresses of weights and pages, so they are recorded when
the weights are loaded, and again when either has moved.
"""

import ctypes
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch

from bough.attention.batch import AttentionBatch
from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology
from bough.executor.machine import usable_cores
from bough.executor.native_recorder import NotRecordedError, RecordedTape, Recorder, Recording, RecordingAttention
from bough.kernels.quant_linear.packed import Format, PackedWeight, aligned_bytes
from bough.memory.pools.kv_pool import KVPool
from bough.models.base import CausalLM
from bough.models.registry import build_model, runs_transformers
from bough.native.tape import Step, ThreadPool

# Each step says which of its rows have adapters.
ADAPTED: Any = SimpleNamespace(tokens=None, among=lambda *_: None, at=lambda *_: None)


def why_not_recorded(config: ModelConfig) -> str | None:
    """What the tapes lack for such a model; None: it can be recorded. Records it once, without its weights."""
    if runs_transformers(config):
        return "they do not run transformers' modules"
    if config.states is not None or config.speech is not None:
        return "they have no recurrent layers, and do not hear"
    recorder, device = Recorder(tokens=1, logits=1), torch.device("cpu")
    small = replace(config, context_length=1)
    model = build_model(small, Topology(), torch.float32, device, packed_ops=recorder.ops)
    for slot in model.slots():
        if slot.packing is not None:
            slot.packing.adopt(PackedWeight(Format.F32, slot.packing.outputs, slot.packing.inputs, aligned_bytes(0)))
    pool = KVPool(small, (1,), 1, torch.float32, device, Topology())
    try:
        with Recording(recorder):
            model.logits(record_forward(model, recorder, pool, torch.empty(1, dtype=torch.int64, device="meta")))
    except NotRecordedError as error:
        return f"they have no operation for the model's {error}"
    return None


@torch.inference_mode()
def record_forward(
    model: CausalLM, recorder: Recorder, pool: KVPool, logits_indices: torch.Tensor | None
) -> torch.Tensor:
    # A tape reads what it needs of the batch from each step. The recorder knows the slots of a KV group by offset.
    slots = torch.empty((len(model.config.kv_groups), 1), dtype=torch.int64, device="meta")
    batch = cast(AttentionBatch, SimpleNamespace(slots=tuple(slots), positions=recorder.positions))
    context = ForwardContext(RecordingAttention(recorder), pool, batch, logits_indices, adapters=ADAPTED)
    return model.forward(recorder.positions, context)


class NativeTapes:
    """Owns the tapes of a model, the buffers that they share, and the threads that run them."""

    def __init__(
        self, library: ctypes.CDLL, model: CausalLM, recorder: Recorder, pool: KVPool, threads: int, tokens: int
    ) -> None:
        self._library = library
        self.thread_pool = ThreadPool(library, threads, patient=threads < usable_cores())
        self._recorder, self.model, self.pool = recorder, model, pool
        self._tokens = tokens
        self.record()

    def record(self) -> None:
        model, finish = self.model, partial(self._recorder.finish, self._library)
        with Recording(self._recorder):
            nothing = torch.empty(1, dtype=torch.int64, device="meta")
            self.last_tokens = finish(None, model.logits(self._forward(nothing), ADAPTED.among))
            self.all_tokens = finish(None, self._forward(None))
            hidden = self._recorder.rows(model.config.hidden_size, on_logits=True)
            self.logits = finish(hidden, model.logits(hidden, ADAPTED.among))
        tapes = (self.last_tokens, self.all_tokens, self.logits)
        size = max(recorded.tape.scratch_bytes(self._tokens, self.thread_pool.threads) for recorded in tapes)
        self._scratch = aligned_bytes(size)

    def drop(self) -> None:
        """Lets go of the weights and pages that the tapes point at, and of their buffers; they cannot run before they
        are recorded again."""
        for name in ("last_tokens", "all_tokens", "logits"):
            self.__dict__.pop(name, None)

    def run(self, recorded: RecordedTape, step: Step) -> None:
        self.thread_pool.run(recorded.tape, step, self._scratch.ctypes.data)

    def _forward(self, logits_indices: torch.Tensor | None) -> torch.Tensor:
        return record_forward(self.model, self._recorder, self.pool, logits_indices)
