"""Kernels compiled ahead: those of every step side by side before the first is launched, and those that only some
requests need before the first of these comes.

Triton compiles a kernel when it is first launched, and a step launches one after the other, so a cold start would be a
queue of compilers. `KernelMakers` walk through a step with every launch left out, and all that it would have launched
is compiled by threads at once: the compiler's passes, the assembler, and the C compiler that makes each launcher run
outside the interpreter's lock.

Filters, penalties, logprobs or a grammar's mask must not delay the start, nor may the first request that has one hold
up all others for the seconds that compiling takes. So their kernels are compiled in quiet moments by a thread, which
runs them on data of its own (`WarmUp`): the scheduler's loop looks in on it every few milliseconds, and goes on as soon
as a request comes.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
import triton
from triton.runtime.cache import triton_key

from bough.executor.machine import usable_cores
from bough.kernels.logits.reference import NO_SLOT, PenaltyLines
from bough.kernels.logits.triton import count_tokens_, forbid_tokens_, log_normaliser, penalise
from bough.kernels.sampling.triton import sample_rows
from bough.sampling.state import SamplingState

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


log = logging.getLogger(__name__)

LOOK_IN_S = 0.005  # that a request waits at most

Piece = Callable[[], None]


def rare_pieces(vocab_size: int, dtype: torch.dtype, device: torch.device) -> list[Piece]:
    """Sampling with filters and penalties, scoring and masking, the likeliest first. Logits come as the model makes
    them, or in float32 where a row has a line of its own."""
    return [
        partial(piece, vocab_size, kind, device)
        for kind in dict.fromkeys((dtype, torch.float32))
        for piece in (_sample_filtered, _penalise, _score, _mask)
    ]


def _sample_filtered(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    parameters = SamplingState(1, vocab_size, device).parameters
    sample_rows(_logits(vocab_size, dtype, device), _first(device), parameters, filtered=True)


def _penalise(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """The line that a row without slots gets, which is the same code, and a token drawn from it."""
    state, first = SamplingState(1, vocab_size, device), _first(device)
    none = torch.full_like(first, NO_SLOT)
    line = penalise(_logits(vocab_size, dtype, device), PenaltyLines(first, first, none, none, none), state.penalties)
    tokens, _ = sample_rows(line, first, state.parameters, filtered=False)
    count_tokens_(state.penalties.counts, none, tokens)


def _score(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    log_normaliser(_logits(vocab_size, dtype, device))


def _mask(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    words = torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32, device=device)
    forbid_tokens_(_logits(vocab_size, dtype, device), words, _first(device))


def _logits(vocab_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((1, vocab_size), dtype=dtype, device=device)


def _first(device: torch.device) -> torch.Tensor:
    """The number of the one row there is."""
    return torch.zeros(1, dtype=torch.int64, device=device)


class WarmUp:
    """Runs `pieces` beside the loop, on a thread that begins with `enter`, and when they are done `last` on the loop's
    own: what needs the executor's parts, and with them the other ranks, which are done when they all `agree`."""

    def __init__(
        self, pieces: Sequence[Piece], last: Piece, enter: Piece | None = None, agree: Callable[[bool], bool] = bool
    ) -> None:
        self._agree = agree
        self._pieces = pieces
        self._last: Piece | None = last
        self._enter = enter
        self._thread: ThreadPoolExecutor | None = None
        self._left: list[Future[None]] = []

    def advance(self) -> bool:
        """Begins, or looks in for a moment; False once there is nothing left to do."""
        if self._last is None:
            return False
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "warm-up", initializer=self._enter)
            self._left = [self._thread.submit(piece) for piece in self._pieces]
        wait(self._left, LOOK_IN_S)
        while self._left and self._left[0].done():
            error = self._left.pop(0).exception()
            if error is not None:  # an engine that serves must not end by what was to make it quicker
                log.warning("a kernel that only some requests need could not be made ready: %s", error)
        if self._agree(not self._left):
            self._thread.shutdown()
            last, self._last = self._last, None
            last()
        return True

    def close(self) -> None:
        """Ends after the piece that is at work."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
