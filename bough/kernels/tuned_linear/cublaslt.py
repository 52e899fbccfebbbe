"""cuBLASLt as ctypes sees it: the algorithms that it proposes for a product, and a product by one of them.

torch takes the first proposal. The library orders them by a model of the device, which knows neither how warm it runs
nor what else is in its cache, so a later one is often faster by some percent.

Owns the library's handle, its workspace, and the descriptions of the products it has been asked for.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import torch

from bough.core.errors import BoughError

# Names of the library's enumerations, with their values there.
COMPUTE_FLOAT32, TYPE_FLOAT32 = 68, 0
TYPES = {torch.bfloat16: 14, torch.float16: 2}
TRANSPOSE_FIRST, TRANSPOSED = 3, 1
MOST_WORKSPACE = 1

PROPOSALS = 16
WORKSPACE_BYTES = 32 << 20  # what NVIDIA advises for Hopper
ALIGNMENT = 256  # bytes, of all pointers: what proposals are made for


class Algorithm(ctypes.Structure):
    """Opaque: how the library will compute one product."""

    _fields_ = [("data", c_uint64 * 8)]


class _Proposal(ctypes.Structure):
    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class CublasLt:
    """Computes x [m, k] @ weight [n, k].T, all three of one 16-bit type, summed in float32."""

    def __init__(self, device: torch.device) -> None:
        self._library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
        _declare(self._library)
        self._handle = c_void_p()
        _check(self._library.cublasLtCreate(byref(self._handle)))
        self._device = device.index if device.index is not None else torch.cuda.current_device()
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._one, self._zero = c_float(1), c_float(0)
        self._product = functools.cache(self._describe)

    def proposals(self, m: int, n: int, k: int, dtype: torch.dtype) -> list[Algorithm]:
        """What the library would try, best guess first."""
        preference, count, found = c_void_p(), c_int(), (_Proposal * PROPOSALS)()
        most = c_uint64(WORKSPACE_BYTES)
        _check(self._library.cublasLtMatmulPreferenceCreate(byref(preference)))
        _check(self._library.cublasLtMatmulPreferenceSetAttribute(preference, MOST_WORKSPACE, byref(most), 8))
        operation, weight, x, out = self._product(m, n, k, dtype)
        heuristic = self._library.cublasLtMatmulAlgoGetHeuristic
        status = heuristic(
            self._handle, operation, weight, x, out, out, preference, PROPOSALS, byref(found), byref(count)
        )
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        _check(status)
        return [p.algorithm for p in found[: count.value] if p.status == 0]

    def supports(self, algorithm: Algorithm, m: int, n: int, k: int, dtype: torch.dtype) -> bool:
        """Whether an algorithm that was proposed for another number of rows can be used for this one."""
        operation, weight, x, out = self._product(m, n, k, dtype)
        result = _Proposal()
        check = self._library.cublasLtMatmulAlgoCheck
        status = check(self._handle, operation, weight, x, out, out, byref(algorithm), byref(result))
        return bool(status == 0 and result.workspace_bytes <= WORKSPACE_BYTES)

    def multiply(self, algorithm: Algorithm, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x @ weight.T, written to `out`; all contiguous, at aligned addresses."""
        (m, k), n = x.shape, weight.shape[0]
        operation, weight_layout, x_layout, out_layout = self._product(m, n, k, x.dtype)
        status = self._library.cublasLtMatmul(
            self._handle,
            operation,
            byref(self._one),
            weight.data_ptr(),
            weight_layout,
            x.data_ptr(),
            x_layout,
            byref(self._zero),
            out.data_ptr(),
            out_layout,
            out.data_ptr(),
            out_layout,
            byref(algorithm),
            self._workspace.data_ptr(),
            WORKSPACE_BYTES,
            torch._C._cuda_getCurrentRawStream(self._device),
        )
        _check(status)
        return out

    def _describe(self, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[c_void_p, c_void_p, c_void_p, c_void_p]:
        """The operation and the layouts of weight, x and result. The library counts in columns: what it is asked for is
        weight @ x.T, of which our result is the transpose, and our weight is already transposed."""
        operation, transposed = c_void_p(), c_int(TRANSPOSED)
        _check(self._library.cublasLtMatmulDescCreate(byref(operation), COMPUTE_FLOAT32, TYPE_FLOAT32))
        _check(self._library.cublasLtMatmulDescSetAttribute(operation, TRANSPOSE_FIRST, byref(transposed), 4))
        return operation, self._layout(k, n, dtype), self._layout(k, m, dtype), self._layout(n, m, dtype)

    def _layout(self, rows: int, columns: int, dtype: torch.dtype) -> c_void_p:
        layout = c_void_p()
        _check(self._library.cublasLtMatrixLayoutCreate(byref(layout), TYPES[dtype], rows, columns, rows))
        return layout


def _check(status: int) -> None:
    if status != 0:
        raise BoughError(f"cuBLASLt answered with status {status}.")


def _declare(library: Any) -> None:
    pointer, size = c_void_p, c_size_t
    signatures: dict[str, list[Any]] = {
        "cublasLtCreate": [POINTER(c_void_p)],
        "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
        "cublasLtMatmulPreferenceSetAttribute": [pointer, c_int, pointer, size],
        "cublasLtMatmulPreferenceDestroy": [pointer],
        "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
        "cublasLtMatmulDescSetAttribute": [pointer, c_int, pointer, size],
        "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
        "cublasLtMatmulAlgoGetHeuristic": [*[pointer] * 7, c_int, pointer, pointer],
        "cublasLtMatmulAlgoCheck": [pointer] * 8,
        "cublasLtMatmul": [*[pointer] * 14, size, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
