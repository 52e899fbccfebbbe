"""Records a model's forward pass as a tape: operations and an attention back end that note what they would compute.

The model runs once over tensors without memory (torch's `meta` device), whose storages stand for buffers; views and
splits cost nothing, as they only move addresses. What layers compute with torch's own functions is noted too, or
refused if there is no operation for it. When the recording ends, buffers get their memory, which those share
that are not needed at the same time, and the operations their addresses. Nothing here depends on an architecture.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bough.attention.base import AttentionBackend, AttentionSpec, IndexQueries, LatentSpec
from bough.attention.batch import AttentionBatch
from bough.core.model_config import MoEConfig
from bough.kernels.lora.reference import MAX_RANK, PackedStack
from bough.kernels.norm_rope_store.reference import QKNormRope
from bough.kernels.ops import PackedExpertWeights, PackedOps, Router
from bough.kernels.quant_linear.packed import PackedWeight, aligned_bytes, structs_of
from bough.memory.pools.kv_pool import KVPool
from bough.native.tape import MAX_EXPERTS, MAX_LATENT_DIM, Lora, Tape

CACHE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `enum bough_number`
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "square": 4}  # `enum bough_activation`
CLAMPED = 2  # of experts only
SCORES = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}  # of routers
LINE = 64  # bytes that buffers are aligned to
# Functions of torch that make views or look at a tensor; `__get__` are its properties.
VIEWS = {"view", "flatten", "split", "chunk", "transpose", "unflatten", "__iter__", "__len__", "unbind"}
NOT_COMPUTING = VIEWS | {"__get__", "empty", "dim", "size", "stride", "storage_offset", "untyped_storage", "data_ptr"}


@dataclass(slots=True, eq=False)
class Buffer:
    """Rows of float32, written by operation `first` and read up to `last`."""

    rows: int
    width: int
    on_logits: bool  # the rows are the tokens whose logits are asked for, not all
    first: int = -1
    last: int = -1

    @property
    def nbytes(self) -> int:
        return -(-self.rows * self.width * 4 // LINE) * LINE

    def used_by(self, operation: int) -> None:
        if self.first < 0:
            self.first = operation
        self.last = max(self.last, operation)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor begins: so many bytes into a buffer."""

    buffer: Buffer
    offset: int


@dataclass(frozen=True, slots=True)
class RecordedTape:
    """A tape, where its input begins if it has one, and its results. [rows, width] each"""

    tape: Tape
    input: torch.Tensor | None
    result: torch.Tensor
    kept: list[Any]  # what the tape's addresses point at


class Recorder:
    """Owns the recording in progress, for steps of up to `tokens` tokens that ask for the logits of up to `logits`."""

    def __init__(self, tokens: int, logits: int) -> None:
        self._tokens, self._logits = tokens, logits
        # Entries of the tape to be: name, arguments, whose places become addresses, and whether it is on logits.
        self._operations: list[tuple[str, tuple[Any, ...], bool]] = []
        self._buffers: dict[int, Buffer] = {}  # by their storage, which `_tensors` keeps alive
        self._tensors: list[torch.Tensor] = []
        self._kept: list[Any] = []  # what the tape's addresses point at
        self.positions = torch.empty(1, dtype=torch.int64, device="meta")  # stands for those of the step's tokens
        self.ops = PackedOps(
            embedding=partial(_refuse, "weights that are not packed"),
            linear=partial(_refuse, "weights that are not packed"),
            rms_norm=self._rms_norm,
            gated_mul=lambda x, activation: self._activate(x, activation, gated=True),
            norm_rope_store_=self._norm_rope_store,
            any_heads=True,
            grow_queries_=self._grow_queries,
            take_rows=self._take_rows,
            softcap=self._softcap,
            latent_store_=self._latent_store,
            index_store_=partial(_refuse, "sparse attention"),
            packed_embedding=self._embedding,
            packed_linear=self._linear,
            packed_experts=self._experts,
            packed_lora=self._lora,
            add_gated=self._add_gated,
        )
        # Of torch's functions, by their names.
        self.functions: dict[str, Callable[..., torch.Tensor]] = {
            "add": self._plus,
            "mul": self._times,
            "index_select": self._at_positions,
            "layer_norm": self._layer_norm,
            "linear": self._plain_linear,
            "gelu": lambda x, approximate="none": self._activate(x, "gelu" if approximate == "none" else "gelu_tanh"),
            **{of: lambda x, inplace=False, of=of: self._activate(x, of) for of in ("silu", "relu", "square")},
        }

    # ---- the beginning and the end

    def rows(self, width: int, on_logits: bool) -> torch.Tensor:
        """A fresh buffer, as the tensor that stands for it."""
        count = self._logits if on_logits else self._tokens
        tensor = torch.empty(count, width, device="meta")
        self._tensors.append(tensor)
        self._buffers[_storage(tensor)] = Buffer(count, width, on_logits)
        return tensor

    def place(self, tensor: torch.Tensor) -> Place:
        """What a tensor of this recording stands for."""
        buffer = self._buffers.get(_storage(tensor))
        if buffer is None:
            raise NotRecordedError("numbers that are no rows")
        return Place(buffer, int(tensor.storage_offset()) * 4)

    def finish(self, library: ctypes.CDLL, entry: torch.Tensor | None, result: torch.Tensor) -> RecordedTape:
        """The recording as a tape with memory for its buffers; the recorder is empty again. The buffer of `result` is
        kept to the tape's end."""
        self.place(result).buffer.used_by(len(self._operations))
        offsets, nbytes = arrange(self._buffers.values())
        memory, tape = aligned_bytes(nbytes), Tape(library)

        def view(of: torch.Tensor) -> torch.Tensor:
            buffer = self.place(of).buffer
            begin = offsets[buffer]
            values = memory[begin : begin + buffer.rows * buffer.width * 4].view(np.float32)
            return torch.from_numpy(values.reshape(buffer.rows, buffer.width))

        base = memory.ctypes.data
        for name, arguments, on_logits in self._operations:
            placed = (base + offsets[a.buffer] + a.offset if isinstance(a, Place) else a for a in arguments)
            tape.add(name, *placed, on_logits=on_logits)
        recorded = RecordedTape(tape, None if entry is None else view(entry), view(result), [memory, *self._kept])
        self._operations, self._buffers, self._tensors, self._kept = [], {}, [], []
        return recorded

    # ---- the operations

    def _embedding(self, token_ids: torch.Tensor, table: PackedWeight, scale: float) -> torch.Tensor:
        out = self.rows(table.k, on_logits=False)
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
        on_logits = self._on_logits(x)
        out = self.rows(x.shape[1], on_logits)
        stream = x if residual is None else self.rows(x.shape[1], on_logits)
        before, after = (None, None) if residual is None else (self.place(residual), self.place(stream))
        settings = (self._address(weight), eps, plus_one, x.shape[1], x.stride(0))
        self._add("rms_norm", self.place(x), before, *settings, self.place(out), after, on_logits=on_logits)
        return out, stream

    def _linear(self, x: torch.Tensor, parts: Sequence[PackedWeight], bias: torch.Tensor | None) -> torch.Tensor:
        outputs, on_logits = sum(part.n for part in parts), self._on_logits(x)
        y = self.rows(outputs, on_logits)
        inputs = (self._structs(parts), len(parts), self.place(x), x.stride(0), self._address(bias))
        self._add("linear", *inputs, self.place(y), outputs, on_logits=on_logits)
        return y

    def _norm_rope_store(
        self,
        qkv: torch.Tensor,
        heads: int,
        kv_heads: int,
        qk_norm_rope: QKNormRope,
        positions: torch.Tensor,
        slots: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        axes: torch.Tensor | None = None,
        norm_last: bool = False,
    ) -> None:
        if axes is not None:
            raise NotRecordedError("rotation by several positions")
        q_weight, k_weight, eps, plus_one, cos, sin = qk_norm_rope
        norms, pointers = map(self._address, (q_weight, k_weight)), map(self._address, (cos, sin, k_cache, v_cache))
        shape, number = (heads, kv_heads, qkv.shape[2]), CACHE_NUMBERS[k_cache.dtype]
        group = slots.storage_offset()
        whole = q_weight is not None and len(q_weight) != qkv.shape[2]
        settings = (eps, plus_one, whole, norm_last, cos.shape[1])
        self._add("norm_rope_store", self.place(qkv), *shape, *norms, *settings, *pointers, number, group)

    def _grow_queries(
        self, qkv: torch.Tensor, heads: int, positions: torch.Tensor, rate: float, span: int, offset: int
    ) -> None:
        self._add("grow_queries", self.place(qkv), qkv.stride(0), heads * qkv.shape[2], rate, span, offset)

    def attention(self, q: torch.Tensor, layer: AttentionSpec, pool: KVPool) -> torch.Tensor:
        if layer.chunked:
            raise NotRecordedError("attention within chunks")
        if not layer.causal and layer.window is not None:
            raise NotRecordedError("windows to both sides")
        out = self.rows(layer.heads * layer.head_dim, on_logits=False)
        keys, values = pool.keys[layer.layer], pool.values[layer.layer]
        shape = (layer.heads, layer.kv_heads, layer.head_dim)
        caches = (self._address(keys), self._address(values), CACHE_NUMBERS[keys.dtype])
        limits = (layer.window or 0, layer.scale, layer.softcap or 0.0, self._address(layer.sinks))
        ways = (layer.ends_only, not layer.causal)
        self._add(
            "attention", *shape, *caches, *limits, *ways, self.place(q), q.stride(0), layer.group, self.place(out)
        )
        return out.view(-1, layer.heads, layer.head_dim)

    def _latent_store(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
        scale: float = 1.0,
    ) -> None:
        heads, rows = (self.place(q), q.stride(0), *q.shape[1:]), (self.place(latents), latents.stride(0))
        if cache.shape[2] > MAX_LATENT_DIM:
            raise NotRecordedError(f"latents of {cache.shape[2]} numbers")
        widths, norm = (len(weight), 2 * cos.shape[1]), (self._address(weight), eps)
        stored = (*map(self._address, (cos, sin, cache)), CACHE_NUMBERS[cache.dtype], slots.storage_offset())
        self._add("latent_store", *heads, *rows, *widths, *norm, *stored)

    def latent_attention(self, q: torch.Tensor, layer: LatentSpec, pool: KVPool) -> torch.Tensor:
        """In the absorbed form; what is found in the part of a latent that rotates is left out at the end."""
        latent, heads = layer.latent, layer.heads
        queries, out = self.rows(heads * latent.width, False), self.rows(heads * latent.value_dim, False)
        nope, rank, width = latent.nope_dim, latent.rank, latent.width
        weight, of_head = layer.weight.data_ptr(), layer.weight.stride(0)
        self._kept.append(layer.weight)
        absorbed = (weight, of_head, heads, nope, rank, latent.rope_dim, True, self.place(queries))
        self._add("by_head", self.place(q), q.stride(0), q.stride(1), *absorbed, heads * width, width)
        absorbing = layer.with_keys(queries.view(-1, heads, width), q)
        attended = self.attention(absorbing, layer.absorbed, pool)
        values = weight + nope * rank * layer.weight.itemsize
        lifted = (values, of_head, heads, rank, latent.value_dim, 0, False, self.place(out))
        self._add("by_head", self.place(attended), heads * width, width, *lifted, *out.stride()[:1], latent.value_dim)
        return layer.with_values(out.view(-1, heads, latent.value_dim), attended)

    def _activate(self, x: torch.Tensor, activation: str, gated: bool = False) -> torch.Tensor:
        on_logits, size = self._on_logits(x), x.shape[1] // (1 + gated)
        out = self.rows(size, on_logits)
        self._add("activate", self.place(x), ACTIVATIONS[activation], gated, size, self.place(out), on_logits=on_logits)
        return out

    def _lora(self, y: torch.Tensor, x: torch.Tensor | None, stack: PackedStack, scale: float = 1.0) -> None:
        on_logits = self._on_logits(y)
        rows = (None, 0) if x is None else (self.place(x), x.stride(0))
        out, thin = (self.place(y), y.stride(0)), self._thin(stack, on_logits)
        self._add("lora", self._stacks([stack]), *rows, scale, *out, thin, on_logits=on_logits)

    def _thin(self, stack: PackedStack, on_logits: bool) -> Place:
        """Room for the products of rows and thin matrices."""
        return self.place(self.rows((len(stack.bands) - 1) * MAX_RANK, on_logits))

    def _experts(
        self, x: torch.Tensor, router: Router, moe: MoEConfig, experts: PackedExpertWeights, activation: str
    ) -> torch.Tensor:
        if moe.experts > MAX_EXPERTS:
            raise NotRecordedError(f"{moe.experts} experts")
        if moe.scales_inputs or not moe.gated:
            raise NotRecordedError("experts with scaled inputs" if moe.gated else "experts without gates")
        on_logits, size = self._on_logits(x), x.shape[1]
        scores, ids, weights = (self.rows(width, on_logits) for width in (moe.experts, moe.per_token, moe.per_token))
        chosen = [self.place(ids), self.place(weights)]
        counts = (moe.experts, moe.per_token, SCORES[moe.scores], moe.groups, moe.top_groups)
        flags = (moe.group_score == "best_two", moe.renormalise, moe.simulate == "uniform")
        router_places = map(self._address, (router.weight, router.logit_bias, router.bias))
        routing = (*router_places, size, *counts, *flags, moe.scale, moe.jitter)
        of_router, of_experts = experts.adapters[2:], experts.adapters[:2]
        added = self._stacks(of_router), self._thin(of_router[0], on_logits) if of_router else None
        self._add("route", *routing, *added, self.place(x), self.place(scores), *chosen, on_logits=on_logits)
        kind, clamp = ACTIVATIONS[activation], moe.clamped_gate or (0.0, 0.0)
        if moe.clamped_gate is not None:
            kind = CLAMPED
        out = self.rows(size, on_logits)
        parts = (self._structs(experts.weights), *map(self._address, (experts.gate_up_bias, experts.down_bias)))
        shape = (moe.experts, moe.per_token, kind, *clamp, self._stacks(of_experts))
        self._add("experts", *parts, *shape, self.place(x), *chosen, self.place(out), on_logits=on_logits)
        return out

    def _add_gated(self, a: torch.Tensor, b: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
        on_logits, size = self._on_logits(a), a.shape[1]
        out = self.rows(size, on_logits)
        places = (self.place(a), self.place(b), None if logits is None else self.place(logits))
        self._add("add_gated", *places, size, self.place(out), on_logits=on_logits)
        return out

    def _take_rows(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        out = self.rows(x.shape[1], on_logits=True)
        self._add("take_rows", self.place(x), x.stride(0), x.shape[1], False, self.place(out), on_logits=True)
        return out

    def _softcap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        self._add("softcap", self.place(logits), logits.shape[1], cap, on_logits=self._on_logits(logits))
        return logits

    # ---- functions of torch

    def _plus(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if isinstance(b, torch.Tensor) and b.shape == a.shape:
            return self._add_gated(a, b)
        if not isinstance(b, torch.Tensor) or b.shape != a.shape[1:]:
            raise NotRecordedError("add")
        return self._scale_shift(a, 1.0, b)

    def _times(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        if not isinstance(scale, float):
            raise NotRecordedError("mul")
        return self._scale_shift(x, scale, None)

    def _scale_shift(self, x: torch.Tensor, scale: float, shift: torch.Tensor | None) -> torch.Tensor:
        out, on_logits = self.rows(x.shape[1], self._on_logits(x)), self._on_logits(x)
        settings = (scale, self._address(shift), x.shape[1])
        self._add("scale_shift", self.place(x), *settings, self.place(out), on_logits=on_logits)
        return out

    def _at_positions(self, table: torch.Tensor, dim: int, positions: torch.Tensor) -> torch.Tensor:
        if positions is not self.positions:
            raise NotRecordedError("index_select")
        out = self.rows(table.shape[1], on_logits=False)
        self._add("take_rows", self._address(table), table.stride(0), table.shape[1], True, self.place(out))
        return out

    def _plain_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is not None or weight.is_meta:
            raise NotRecordedError("linear")
        (outputs, inputs), on_logits = weight.shape, self._on_logits(x)
        out = self.rows(outputs, on_logits)
        one_head = (self._address(weight), 0, 1, inputs, outputs, 0, False)
        self._add("by_head", self.place(x), inputs, 0, *one_head, self.place(out), outputs, 0, on_logits=on_logits)
        return out

    def _layer_norm(
        self,
        x: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        out, on_logits = self.rows(x.shape[1], self._on_logits(x)), self._on_logits(x)
        settings = (self._address(weight), self._address(bias), eps, x.shape[1])
        self._add("layer_norm", self.place(x), *settings, self.place(out), on_logits=on_logits)
        return out

    # ---- the details

    def _add(self, name: str, *arguments: Any, on_logits: bool = False) -> None:
        for argument in arguments:
            if isinstance(argument, Place):
                argument.buffer.used_by(len(self._operations))
        self._operations.append((name, arguments, on_logits))

    def _on_logits(self, x: torch.Tensor) -> bool:
        return self.place(x).buffer.on_logits

    def _address(self, tensor: torch.Tensor | None) -> int | None:
        self._kept.append(tensor)
        return None if tensor is None else tensor.data_ptr()

    def _structs(self, parts: Sequence[PackedWeight]) -> int:
        structs = structs_of(parts)
        self._kept.append((structs, list(parts)))
        return ctypes.addressof(structs)

    def _stacks(self, stacks: Sequence[PackedStack]) -> int | None:
        sizes = [(len(of.bands) - 1, of.inputs, of.bands.ctypes.data, of.step, of.gap) for of in stacks]
        made = [Lora(of.thin.ctypes.data, *of_stack) for of, of_stack in zip(stacks, sizes, strict=True)]
        structs = (Lora * len(made))(*made)
        self._kept.append((structs, list(stacks)))
        return ctypes.addressof(structs) if made else None


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

    def run_latent(
        self, q: torch.Tensor, latents: torch.Tensor, layer: LatentSpec, pool: KVPool, index: IndexQueries | None = None
    ) -> torch.Tensor:
        return self._recorder.latent_attention(q, layer, pool)


def arrange(buffers: Iterable[Buffer]) -> tuple[dict[Buffer, int], int]:
    """Where each buffer begins in a common piece of memory, and how many bytes that has. Buffers are placed in the
    order in which they are written, each in the first gap that is wide enough. A buffer is needed from the operation
    that writes it to the last one that reads it."""
    offsets: dict[Buffer, int] = {}
    end = 0
    for buffer in sorted(buffers, key=lambda buffer: buffer.first):
        living = sorted(
            (offset, offset + other.nbytes) for other, offset in offsets.items() if other.last >= buffer.first
        )
        at = 0
        for begin, stop in living:
            if begin - at >= buffer.nbytes:
                break
            at = max(at, stop)
        offsets[buffer] = at
        end = max(end, at + buffer.nbytes)
    return offsets, end


class Unchanged(TorchDispatchMode):
    """Refuses what changes a tensor, also where no function of torch announces it (`Tensor.set_`): a tape would not do
    it again with the next step."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else torch's compiler is imported, which takes seconds
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise NotRecordedError(func._schema.name)
        return func(*args, **(kwargs or {}))


class Recording(TorchFunctionMode):
    """While a model is recorded: notes what torch would compute of the rows, or refuses it, since it would not be on
    the tape. What is computed of weights alone is computed."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder, self._unchanged = recorder, Unchanged()

    def __enter__(self) -> Any:
        self._unchanged.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._unchanged.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.__name__, kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        if name in NOT_COMPUTING or not (name == "__set__" or any(tensor.is_meta for tensor in tensors)):
            return func(*args, **options)
        other = options.get("inplace", False) or options.keys() & {"out", "alpha"}  # results where no entry writes them
        if other or name not in self._recorder.functions or not all(tensor.is_contiguous() for tensor in tensors):
            raise NotRecordedError(name)
        return self._recorder.functions[name](*args, **options)


class NotRecordedError(Exception):
    """The operation that a tape has no entry for."""


def _storage(tensor: torch.Tensor) -> int:
    """What views of one tensor have in common."""
    return int(tensor.untyped_storage()._cdata)


def _refuse(what: str, *arguments: Any) -> NoReturn:
    raise NotRecordedError(what)
