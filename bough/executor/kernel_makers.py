# mypy: disable-error-code="import-untyped"
"""Kernels compiled side by side, before the first of them is launched.

Triton compiles a kernel when it is first launched, and a step launches one after the other, so a cold start would be a
queue of compilers. Here a step is walked through with every launch left out, and all that it would have launched is
compiled by threads at once: the compiler's passes, the assembler, and the C compiler that makes each launcher run
outside the interpreter's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

import triton
from triton.runtime.cache import triton_key

from bough.executor.machine import usable_cores

MOST_THREADS = 16  # the steps of a start have some 25 kernels, of which attention's take as long as ten others

Compile = Callable[[], Any]

_one_walk = threading.Lock()  # launches are redirected in the whole process


class KernelMakers:
    """Owns the threads that compile, each of which begins with `enter`.

    Made before weights are loaded, because Triton's name for itself, a hash over all of its files that is part of every
    kernel's, takes most of a second and is worked out meanwhile.
    """

    def __init__(self, enter: Callable[[], None] | None = None) -> None:
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, usable_cores()), "kernels", enter)
        self._own_name = self._threads.submit(triton_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()

    def submit(self, compile_kernel: Compile) -> Future[Any]:
        """Triton hands over here what is to be compiled. The launcher is made at once, not by the first launch."""
        return self._threads.submit(_make_ready, compile_kernel)

    @contextmanager
    def instead_of_launches(self) -> Iterator[None]:
        """Within, launches of Triton's kernels by this thread compile and do nothing; afterwards these are ready.

        Only for steps whose indices come from the host or from memory that was set: what a kernel would have computed
        is garbage. A kernel that cannot be made says so when it is really launched.
        """
        self._own_name.result()
        walker = threading.get_ident()
        with _one_walk, triton.AsyncCompileMode(self, ignore_errors=True):
            run: Callable[..., Any] = triton.JITFunction.run

            def leave_out(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
                return run(kernel, *args, warmup=warmup or threading.get_ident() == walker, **options)

            triton.JITFunction.run = leave_out
            try:
                yield
            finally:
                triton.JITFunction.run = run


def _make_ready(compile_kernel: Compile) -> Any:
    kernel = compile_kernel()
    kernel.run  # noqa: B018 (reading it makes the launcher and loads the kernel onto the device)
    return kernel
