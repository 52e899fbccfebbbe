"""Programmatic dependent launch: a kernel is set up while the one before it still runs, and then waits for its results.

It saves about a microsecond between two short kernels; long ones gain nothing. A kernel that is launched with
`**overlap(tokens)` must call `take_turn` before it writes anything, and before it reads what another such kernel
writes. Until then it may read weights, and what was written before the last kernel *without* overlap ended: such a
kernel begins when all before it have ended. Devices that cannot do it run the same kernels one after another.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without NVIDIA's part: there these are in code that is never compiled

    @triton.jit
    def gdc_launch_dependents():
        pass

    @triton.jit
    def gdc_wait():
        pass


HOPPER = (9, 0)
FEW_TOKENS = 128  # up to here kernels are short


def overlap(tokens: int) -> dict[str, Any]:
    """What to launch a kernel of a step of so many tokens with."""
    return _early() if tokens <= FEW_TOKENS else {"OVERLAP": False}


@functools.cache
def _early() -> dict[str, Any]:
    """What this machine's GPU can do."""
    if torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= HOPPER:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


def zeros_of_stream(purpose: str, count: int, device: torch.device) -> torch.Tensor:
    """Counters that kernels leave at zero. Kernels of two streams run side by side, so each stream has its own, and so
    have CUDA graphs, of which one runs at a time; theirs are made before a capture, which would not make them zero."""
    own, graphs = 0, _zeros(purpose, count, device, -1)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return graphs
        own = torch.cuda.current_stream(device).cuda_stream
    return _zeros(purpose, count, device, own)


@functools.cache
def _zeros(purpose: str, count: int, device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


@triton.jit
def take_turn(OVERLAP: tl.constexpr):
    """Lets the next kernel be set up, and waits until all before this one are done."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def take_turn_first(OVERLAP: tl.constexpr):
    """The same in another order: the next kernel may then read all that was written before this one, before its own
    turn."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
