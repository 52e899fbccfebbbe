"""Drives a recorded model as `Forward` drives one that torch computes, so that both can be compared step by step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bough.attention.batch import AttentionBatch
from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology
from bough.executor.native_recorder import Recorder
from bough.executor.native_tapes import NativeTapes
from bough.loader.load import load_weights
from bough.loader.source import WeightSource
from bough.models.registry import build_model
from bough.native.tape import Step
from tests.fakes.forward import CPU, Forward
from tests.fakes.forward import Step as Rows

ROOM = 96


class NativeForward(Forward):
    """Runs steps of one model on its tapes."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        source: WeightSource,
        *,
        threads: int = 1,
        quantization: str = "none",
        **options: Any,
    ) -> None:
        recorder = Recorder(tokens=ROOM, logits=ROOM)
        model = build_model(config, Topology(), torch.float32, CPU, quantization=quantization, packed_ops=recorder.ops)
        load_weights(model.slots(), source, progress=False, device=CPU)
        super().__init__(model, **options)
        self.tapes = NativeTapes(library, model, recorder, self.pool, threads, ROOM)

    def step(self, tokens: Rows) -> dict[int, torch.Tensor]:
        """The logits of all tokens."""
        batch = self._batch(tokens)
        self._run(self.tapes.all_tokens, tokens, batch, [])
        count = len(batch.positions)
        logits = self.tapes.logits
        assert logits.input is not None
        logits.input[:count] = self.tapes.all_tokens.result[:count]
        self.tapes.run(logits, Step(logits_count=count))
        starts = batch.query_starts.tolist()
        return {row: logits.result[starts[i] : starts[i + 1]].clone() for i, row in enumerate(tokens)}

    def step_of_ends(self, tokens: Rows) -> dict[int, torch.Tensor]:
        """The logits of each row's last token."""
        batch = self._batch(tokens)
        self._run(self.tapes.last_tokens, tokens, batch, (batch.query_starts[1:] - 1).tolist())
        return {row: self.tapes.last_tokens.result[i].clone() for i, row in enumerate(tokens)}

    def _run(self, tape: Any, tokens: Rows, batch: AttentionBatch, wanted: Sequence[int]) -> None:
        ids = torch.tensor([token for new in tokens.values() for token in new])
        arrays = [np.array(wanted, dtype=np.int64), batch.rows.numpy().astype(np.int32)]
        arrays += [batch.query_starts, batch.context_lens]
        step = Step(len(ids), len(tokens), len(wanted), ids.data_ptr(), batch.positions.data_ptr())
        step.slots = batch.slots[0].data_ptr()  # strides are 0: all groups have the same
        step.logits_indices, step.rows, step.query_starts, step.context_lens = (a.ctypes.data for a in arrays)
        step.page_table, step.page_table_width = self.page_table.data_ptr(), self.page_table.shape[1]
        step.page_size = self.pool.page_size
        self.tapes.run(tape, step)
        for row, new in tokens.items():
            self.lengths[row] += len(new)
