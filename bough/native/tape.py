"""Tapes of the native library as Python objects: `Tape` adds operations, `ThreadPool` runs them and draws tokens.

Addresses are plain integers; the recorder keeps alive what they point at. `src/tape.h` and `src/sampling.h` say
what the arguments mean.
"""

import ctypes
import functools
import weakref
from collections.abc import Iterator
from typing import Any

from bough.core.errors import ResourceError
from bough.core.files import table_beside

Address, Size, Int, Float, Bool = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_bool

MAX_VOCABULARY = 1 << 19  # BOUGH_MAX_VOCABULARY of sampling.h
MAX_THREADS = 255  # of a pool: BOUGH_MAX_THREADS of thread_pool.h
MAX_EXPERTS = 1024  # BOUGH_MAX_EXPERTS of experts.h
MAX_LATENT_DIM = 576  # BOUGH_MAX_LATENT_DIM of ops.h
TYPES: dict[str, type[Any]] = {"Address": Address, "Size": Size, "Int": Int, "Float": Float, "Bool": Bool}
ARGUMENTS = {  # of each operation
    name: tuple(TYPES[word] for word in words.split()) for name, words in table_beside(__file__, "tape.toml").items()
}
KINDS = list(ARGUMENTS)
STRUCTS = {
    name: type(name, (ctypes.Structure,), {"_fields_": [(f"argument_{i}", of) for i, of in enumerate(types)]})
    for name, types in ARGUMENTS.items()
}


def _each(of: type[Any], *names: str) -> Iterator[tuple[str, type[Any]]]:
    return ((name, of) for name in names)


class _AnyArguments(ctypes.Union):
    _fields_ = tuple(STRUCTS.items())


class Operation(ctypes.Structure):
    """`bough_operation` of tape.h."""

    _fields_ = (("kind", Int), ("on_logits", Bool), ("arguments", _AnyArguments))


class Spans(ctypes.Structure):
    """`bough_spans` of step.h."""

    _fields_ = (("bounds", Address), ("count", Size))


class Lora(ctypes.Structure):
    """`bough_lora` of lora.h."""

    _fields_ = (("thin", Address), *_each(Size, "matrices", "inputs"), ("bands", Address), *_each(Size, "step", "gap"))


class Step(ctypes.Structure):
    """`bough_step` of step.h."""

    _fields_ = (
        *_each(Size, "tokens", "batch", "logits_count"),
        *_each(Address, "token_ids", "positions", "slots", "logits_indices"),
        *_each(Address, "rows", "query_starts", "context_lens", "page_table"),
        *_each(Size, "slots_stride", "page_table_stride", "page_table_width", "page_size"),
        *_each(Address, "media", "is_media", "adapters", "logits_adapters", "common"),
        *_each(Spans, "prompts", "logits_prompts"),
    )


class Sampling(ctypes.Structure):
    """`bough_sampling` of sampling.h."""

    _fields_ = (
        *_each(Size, "count", "vocabulary"),
        *_each(Address, "logits", "rows", "random", "temperature", "top_k", "top_p", "min_p", "seed", "generated"),
        *_each(Address, "tokens", "bad", "scratch", "masks", "mask_lines"),
    )


class Tape:
    """A recorded sequence of operations."""

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library)
        self._library = library
        self._recorded: list[Operation] = []

    def add(self, name: str, *arguments: Any, on_logits: bool = False) -> None:
        """Adds an operation with the arguments that `ARGUMENTS` names."""
        assert len(arguments) == len(ARGUMENTS[name])
        union = _AnyArguments(**{name: STRUCTS[name](*arguments)})
        self._recorded.append(Operation(KINDS.index(name), on_logits, union))

    @functools.cached_property
    def operations(self) -> ctypes.Array[Operation]:
        """All of them; none can be added afterwards."""
        return (Operation * len(self._recorded))(*self._recorded)

    def scratch_bytes(self, tokens: int, threads: int) -> int:
        return int(self._library.bough_tape_scratch(self.operations, len(self.operations), tokens, threads))


class ThreadPool:
    """The threads that run tapes, the caller being one of them. They sleep when there is nothing to do; patient
    ones wait a millisecond before, for where other processes have cores of their own."""

    def __init__(self, library: ctypes.CDLL, threads: int, *, patient: bool = False) -> None:
        declare(library)
        self._run, self._sample = library.bough_tape_run, library.bough_sample
        self._sampling_scratch = library.bough_sampling_scratch
        self.threads = threads
        self.handle: int | None = library.bough_thread_pool_create(threads, patient)
        if not self.handle:
            raise ResourceError(f"{threads} compute threads cannot be started; choose fewer with --cpu-threads.")
        weakref.finalize(self, library.bough_thread_pool_destroy, self.handle)

    def run(self, tape: Tape, step: Step, scratch: int) -> None:
        """Runs a tape to its end; the interpreter's lock is free meanwhile."""
        self._run(tape.operations, len(tape.operations), ctypes.byref(step), scratch, self.handle)

    def sampling_scratch_bytes(self, vocabulary: int) -> int:
        return int(self._sampling_scratch(vocabulary, self.threads))

    def sample(self, rows: Sampling) -> None:
        """Draws the next tokens."""
        self._sample(ctypes.byref(rows), self.handle)


def declare(library: ctypes.CDLL) -> None:
    """Tells ctypes the signatures of thread_pool.h, tape.h and sampling.h."""
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "bough_thread_pool_create": (Address, [Int, Bool]),
        "bough_thread_pool_destroy": (None, [Address]),
        "bough_tape_scratch": (ctypes.c_size_t, [Address, Size, Size, Int]),
        "bough_tape_run": (None, [Address, Size, Address, Address, Address]),
        "bough_sample": (None, [Address, Address]),
        "bough_sampling_scratch": (ctypes.c_size_t, [Size, Int]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
