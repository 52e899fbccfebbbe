"""How much shared memory a program may have on this machine's GPU, by which the sizes of tiles are chosen.

A kernel that wants more than there is cannot be launched at all. Tiles were tuned where there is plenty; elsewhere they
are as large as fits, which `tests/kernels/compile_all.py` checks for devices of each kind. Owns nothing but what the
driver said.
"""

import functools

import torch
from triton.runtime import driver

PLENTY = 160 << 10  # bytes: NVIDIA's devices for data centres, since Ampere. Its others have 99 KiB
LITTLE = 64 << 10  # AMD's


@functools.cache
def shared_bytes() -> int:
    """Of the device that this process runs on; plenty where there is none: Triton's interpreter knows no limit."""
    if not torch.cuda.is_available():
        return PLENTY
    return int(driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])
