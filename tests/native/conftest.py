"""The compiled library, and its variants one after the other."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from bough.native.build import compiler
from bough.native.library import build_library, find_library, load_library

TIERS = {"plain": 0, "avx2": 1, "avx512": 3, "best": 0xFFFFFFFF}  # masks of cpu.h; the best may have matrix tiles


@pytest.fixture(scope="session", autouse=True)
def one_thread_for_torch() -> Iterator[None]:
    """What is computed beside the kernels is small; more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """Compiled if it is not there."""
    if find_library() is None:
        if compiler() is None:
            pytest.skip("there is no C compiler")
        build_library()
    found = load_library()
    assert found is not None
    return found


@pytest.fixture(params=TIERS)
def any_tier(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """The library, made to believe that it runs on a lesser CPU."""
    library.bough_cpu_allow(ctypes.c_uint(TIERS[request.param]))
    yield library
    library.bough_cpu_allow(ctypes.c_uint(TIERS["best"]))
