"""Tapes of the native library as Python objects: `Tape` adds operations, `Crew` runs them and draws tokens.

Addresses are plain integers; whoever records must keep alive what they point at. The meaning of the arguments is told
in `src/tape.h` and `src/sampling.h`.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from bough.core.errors import ResourceError

Address, Size, Int, Float, Bool = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_bool

MAX_VOCABULARY = 1 << 19  # BOUGH_MAX_VOCABULARY of sampling.h
MAX_THREADS = 255  # of a crew: BOUGH_MAX_THREADS of team.h
SIGNATURES: dict[str, list[type]] = {
    "embedding": [Address, Float, Address],
    "rms_norm": [Bool, Address, Address, Address, Float, Bool, Size, Address, Address],
    "linear": [Bool, Address, Int, Address, Size, Address, Address, Size],
    "norm_rope_store": [
        *(Address, Int, Int, Int, Address, Address, Float, Bool, Address, Address, Address, Address, Int, Int),
    ],
    "attention": [Address, Size, Int, Int, Int, Address, Address, Int, Size, Float, Float, Bool, Int, Address],
    "gate": [Bool, Address, Int, Size, Address],
    "take_wanted": [Address, Size, Size, Address],
    "softcap": [Bool, Address, Size, Float],
}


class Spans(ctypes.Structure):
    """`bough_spans` of step.h."""

    _fields_ = (("bounds", Address), ("count", Size))


class Step(ctypes.Structure):
    """`bough_step` of step.h."""

    _fields_ = (
        ("tokens", Size),
        ("batch", Size),
        ("wanted", Size),
        ("token_ids", Address),
        ("positions", Address),
        ("slots", Address),
        ("wanted_tokens", Address),
        ("rows", Address),
        ("query_starts", Address),
        ("context_lens", Address),
        ("page_table", Address),
        ("slots_stride", Size),
        ("page_table_stride", Size),
        ("page_table_width", Size),
        ("page_size", Size),
        ("prompts", Spans),
        ("wanted_prompts", Spans),
    )


class Sampling(ctypes.Structure):
    """`bough_sampling` of sampling.h."""

    _fields_ = (
        ("count", Size),
        ("vocabulary", Size),
        ("logits", Address),
        ("rows", Address),
        ("random", Address),
        ("temperature", Address),
        ("top_k", Address),
        ("top_p", Address),
        ("min_p", Address),
        ("seed", Address),
        ("generated", Address),
        ("tokens", Address),
        ("bad", Address),
        ("scratch", Address),
        ("masks", Address),
        ("mask_lines", Address),
    )


class Tape:
    """A recorded sequence of operations."""

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library)
        self._library = library
        self.handle: int = library.bough_tape_create()
        self.names: list[str] = []
        weakref.finalize(self, library.bough_tape_destroy, self.handle)

    def add(self, name: str, *arguments: Any) -> None:
        """Adds the operation `bough_tape_<name>`."""
        if getattr(self._library, f"bough_tape_{name}")(self.handle, *arguments):
            raise ResourceError(f"The operation {name} cannot be recorded; use --attention-backend torch.")
        self.names.append(name)

    def scratch_bytes(self, tokens: int, threads: int) -> int:
        return int(self._library.bough_tape_scratch(self.handle, tokens, threads))

    def seconds(self) -> list[tuple[str, float]]:
        """Time spent in each operation, where `BOUGH_NATIVE_PROFILE` is set."""
        return [(name, self._library.bough_tape_seconds(self.handle, index)) for index, name in enumerate(self.names)]


class Crew:
    """The threads that run tapes, the caller being one of them. They sleep when there is nothing to do; patient
    ones wait a millisecond before, for where other processes have cores of their own."""

    def __init__(self, library: ctypes.CDLL, threads: int, *, patient: bool = False) -> None:
        declare(library)
        self._run, self._sample = library.bough_tape_run, library.bough_sample
        self._sampling_scratch = library.bough_sampling_scratch
        self.threads = threads
        self.handle: int | None = library.bough_crew_create(threads, patient)
        if not self.handle:
            raise ResourceError(f"{threads} compute threads cannot be started; choose fewer with --cpu-threads.")
        weakref.finalize(self, library.bough_crew_destroy, self.handle)

    def run(self, tape: Tape, step: Step, scratch: int) -> None:
        """Runs a tape to its end; the interpreter's lock is free meanwhile."""
        self._run(tape.handle, ctypes.byref(step), scratch, self.handle)

    def sampling_scratch_bytes(self, vocabulary: int) -> int:
        return int(self._sampling_scratch(vocabulary, self.threads))

    def sample(self, rows: Sampling) -> None:
        """Draws the next tokens."""
        self._sample(ctypes.byref(rows), self.handle)


def declare(library: ctypes.CDLL) -> None:
    """Tells ctypes the signatures of tape.h and team.h."""
    library.bough_crew_create.restype, library.bough_crew_create.argtypes = Address, [Int, ctypes.c_bool]
    library.bough_crew_destroy.restype, library.bough_crew_destroy.argtypes = None, [Address]
    library.bough_tape_create.restype, library.bough_tape_create.argtypes = Address, []
    library.bough_tape_destroy.restype, library.bough_tape_destroy.argtypes = None, [Address]
    library.bough_tape_scratch.restype, library.bough_tape_scratch.argtypes = ctypes.c_size_t, [Address, Size, Int]
    library.bough_tape_run.restype, library.bough_tape_run.argtypes = None, [Address, Address, Address, Address]
    library.bough_tape_seconds.restype, library.bough_tape_seconds.argtypes = ctypes.c_double, [Address, Size]
    library.bough_sample.restype, library.bough_sample.argtypes = None, [Address, Address]
    library.bough_sampling_scratch.restype, library.bough_sampling_scratch.argtypes = ctypes.c_size_t, [Size, Int]
    for name, arguments in SIGNATURES.items():
        function = getattr(library, f"bough_tape_{name}")
        function.restype, function.argtypes = Int, [Address, *arguments]
