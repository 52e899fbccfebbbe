"""Records a model's forward pass as a tape: operations and an attention back end that note what they would compute.

The model runs once over tensors without memory (torch's `meta` device), whose storages stand for buffers; views and
splits cost nothing, as they only move addresses. When the recording ends, buffers get their memory and the operations
their addresses. Nothing here depends on an architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bough.attention.base import AttentionBackend, AttentionSpec
from bough.attention.batch import AttentionBatch
from bough.executor.native_buffers import Arrangement, Buffer, arrange
from bough.kernels.packed_ops import PackedOps
from bough.kernels.quant_linear.native import structs_of
from bough.kernels.quant_linear.packed import PackedWeight
from bough.memory.pools.kv_pool import KVPool
from bough.native.tape import Tape

CACHE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `enum bough_number`
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor begins: so many bytes into a buffer."""

    buffer: Buffer
    offset: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry of the tape to be; its places become addresses."""

    name: str
    arguments: tuple[Any, ...]


class Recorder:
    """Owns the recording in progress. `tokens` and `wanted` are the most rows that a step can have of each."""

    def __init__(self, tokens: int, wanted: int) -> None:
        self._tokens, self._wanted = tokens, wanted
        self._operations: list[Operation] = []
        self._buffers: dict[int, Buffer] = {}  # by their storage, which `_tensors` keeps alive
        self._tensors: list[torch.Tensor] = []
        self._kept: list[Any] = []  # what the tape's addresses point at
        self.ops = PackedOps(
            embedding=_not_recorded,
            linear=_not_recorded,
            rms_norm=self._rms_norm,
            silu_mul=lambda x: self._gate(x, "silu"),
            gelu_tanh_mul=lambda x: self._gate(x, "gelu_tanh"),
            norm_rope_store_=self._norm_rope_store,
            take_rows=self._take_rows,
            softcap=self._softcap,
            packed_embedding=self._embedding,
            packed_linear=self._linear,
        )

    # ---- the beginning and the end

    def rows(self, width: int, on_wanted: bool) -> torch.Tensor:
        """A fresh buffer, as the tensor that stands for it."""
        count = self._wanted if on_wanted else self._tokens
        tensor = torch.empty(count, width, device="meta")
        self._tensors.append(tensor)
        self._buffers[_storage(tensor)] = Buffer(count, width, on_wanted)
        return tensor

    def place(self, tensor: torch.Tensor) -> Place:
        """What a tensor of this recording stands for."""
        return Place(self._buffers[_storage(tensor)], int(tensor.storage_offset()) * 4)

    def arrange(self, results: Iterable[torch.Tensor]) -> Arrangement:
        """Gives all buffers their places; those of `results` are kept to the tape's end."""
        for result in results:
            self.place(result).buffer.used_by(len(self._operations))
        return arrange(self._buffers.values())

    def write(self, tape: Tape, arrangement: Arrangement, base: int) -> list[Any]:
        """Adds the operations to a tape whose memory begins at `base`, and forgets them. Returns what the tape points
        at and must be kept as long as it."""
        for operation in self._operations:
            tape.add(
                operation.name,
                *(
                    base + arrangement.offsets[a.buffer] + a.offset if isinstance(a, Place) else a
                    for a in operation.arguments
                ),
            )
        kept, self._kept = self._kept, []
        self._operations, self._buffers, self._tensors = [], {}, []
        return kept

    # ---- the operations

    def _embedding(self, token_ids: torch.Tensor, table: PackedWeight, scale: float) -> torch.Tensor:
        out = self.rows(table.k, on_wanted=False)
        self._add("embedding", self._structs([table]), scale, self.place(out))
        return out

    def _rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
        plus_one: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        on_wanted = self._on_wanted(x)
        out = self.rows(x.shape[1], on_wanted)
        stream = x if residual is None else self.rows(x.shape[1], on_wanted)
        sides = (None, None) if residual is None else (self.place(residual), self.place(stream))
        settings = (self._address(weight), eps, plus_one, x.shape[1])
        self._add("rms_norm", on_wanted, self.place(x), sides[0], *settings, self.place(out), sides[1])
        return out, stream

    def _linear(self, x: torch.Tensor, parts: Sequence[PackedWeight], bias: torch.Tensor | None) -> torch.Tensor:
        outputs, on_wanted = sum(part.n for part in parts), self._on_wanted(x)
        y = self.rows(outputs, on_wanted)
        weights = (self._structs(parts), len(parts))
        bias_at = None if bias is None else self._address(bias)
        self._add("linear", on_wanted, *weights, self.place(x), x.stride(0), bias_at, self.place(y), outputs)
        return y

    def _norm_rope_store(
        self,
        qkv: torch.Tensor,
        heads: int,
        kv_heads: int,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        plus_one: bool,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        norms = (None if weight is None else self._address(weight) for weight in (q_weight, k_weight))
        pointers = map(self._address, (cos, sin, k_cache, v_cache))
        shape, number = (heads, kv_heads, qkv.shape[2]), CACHE_NUMBERS[k_cache.dtype]
        self._add(
            "norm_rope_store", self.place(qkv), *shape, *norms, eps, plus_one, *pointers, number, slots.storage_offset()
        )

    def attention(self, q: torch.Tensor, layer: AttentionSpec, pool: KVPool) -> torch.Tensor:
        out = self.rows(layer.heads * layer.head_dim, on_wanted=False)
        keys, values = pool.keys[layer.layer], pool.values[layer.layer]
        self._add(
            "attention",
            self.place(q),
            q.stride(0),
            layer.heads,
            layer.kv_heads,
            layer.head_dim,
            self._address(keys),
            self._address(values),
            CACHE_NUMBERS[keys.dtype],
            layer.window or 0,
            layer.scale,
            layer.softcap or 0.0,
            layer.ends_only,
            layer.group,
            self.place(out),
        )
        return out.view(-1, layer.heads, layer.head_dim)

    def _gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        on_wanted, size = self._on_wanted(x), x.shape[1] // 2
        out = self.rows(size, on_wanted)
        self._add("gate", on_wanted, self.place(x), ACTIVATIONS[activation], size, self.place(out))
        return out

    def _take_rows(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        out = self.rows(x.shape[1], on_wanted=True)
        self._add("take_wanted", self.place(x), x.stride(0), x.shape[1], self.place(out))
        return out

    def _softcap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        self._add("softcap", self._on_wanted(logits), self.place(logits), logits.shape[1], cap)
        return logits

    # ---- the details

    def _add(self, name: str, *arguments: Any) -> None:
        for argument in arguments:
            if isinstance(argument, Place):
                argument.buffer.used_by(len(self._operations))
        self._operations.append(Operation(name, arguments))

    def _on_wanted(self, x: torch.Tensor) -> bool:
        return self.place(x).buffer.on_wanted

    def _address(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _structs(self, parts: Sequence[PackedWeight]) -> Any:
        structs = structs_of(parts)
        self._kept.append((structs, list(parts)))
        return structs


class RecordingAttention(AttentionBackend):
    """The attention back end of a recording."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def prepare(self, batch: AttentionBatch) -> None:
        """A tape fits every batch."""

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor:
        return self._recorder.attention(q, layer, pool)


def _storage(tensor: torch.Tensor) -> int:
    """What views of one tensor have in common."""
    return int(tensor.untyped_storage()._cdata)


def _not_recorded(*arguments: Any) -> torch.Tensor:
    raise AssertionError("models that are recorded have packed weights")
