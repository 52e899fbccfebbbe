"""Products with packed weights outside of tapes, for models that torch runs: one call into the library for each."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

import torch

from bough.kernels.ops import REFERENCE, Ops, PackedOps
from bough.kernels.quant_linear.packed import PackedWeight, aligned_bytes, linear_library, structs_of
from bough.native.tape import ThreadPool

SHARED = 4 << 20  # multiplications of which threads share a product; fewer are done before another one has woken up


class LoneProducts:
    """Owns the threads and their scratch memory; `ops` are the reference's, and these products."""

    def __init__(self, threads: int) -> None:
        self._library = linear_library()
        self._alone, self._all = ThreadPool(self._library, 1), ThreadPool(self._library, threads)
        self._scratch = aligned_bytes(0)
        common: dict[str, Any] = {field.name: getattr(REFERENCE, field.name) for field in fields(Ops)}
        own: dict[str, Any] = {"packed_embedding": self.embedding, "packed_linear": self.linear}
        self.ops = PackedOps(**common, **own, packed_experts=_not_here, packed_lora=_not_here)

    def linear(self, x: torch.Tensor, parts: Sequence[PackedWeight], bias: torch.Tensor | None) -> torch.Tensor:
        rows, structs = x.contiguous(), structs_of(parts)
        out = torch.empty(len(rows), sum(part.n for part in parts))
        pool = self._all if rows.numel() * out.shape[1] > SHARED else self._alone
        needed = self._library.bough_linear_scratch(structs, len(parts), len(rows), pool.threads)
        if needed > len(self._scratch):
            self._scratch = aligned_bytes(needed)
        given = (rows.data_ptr(), rows.stride(0), out.data_ptr(), out.stride(0))
        more = (None if bias is None else bias.data_ptr(), len(rows), True, self._scratch.ctypes.data)
        self._library.bough_linear_alone(pool.handle, structs, len(parts), *given, *more)
        return out

    def embedding(self, token_ids: torch.Tensor, table: PackedWeight, scale: float) -> torch.Tensor:
        out, structs = torch.empty(len(token_ids), table.k), structs_of([table])
        for row, token in zip(out, token_ids.tolist(), strict=True):
            self._library.bough_weight_row(structs, token, row.data_ptr())
        return out * scale


def _not_here(*arguments: Any) -> NoReturn:
    raise NotImplementedError("No model that torch runs with packed weights has experts or adapters.")
