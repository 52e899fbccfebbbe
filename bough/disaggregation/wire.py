"""What a decode engine and a prefill engine say to each other.

The decode engine claims a room: one prompt. It says which tokens it has already, and usually brings the request itself;
where a router has sent that to both, the room's number brings the two together. The prefill engine sends pages as
chunks are computed, then what else the request is. Each room ends with `Done` or `Failed`, or with `Cancel`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from bough.messages.outputs import LogprobRun, Started
from bough.messages.requests import Generate
from bough.scheduler.request import Request

UNAVAILABLE = "PrefillUnavailableError"  # another pair of engines may do better
Buffer = npt.NDArray[np.uint8]


class Identity(msgspec.Struct, frozen=True):
    """What must be equal for pages of one engine to mean the same in another."""

    model: str  # a fingerprint of its files
    cache_dtype: str
    page_size: int
    page_bytes: tuple[int, ...]  # of each group, on one rank
    groups: tuple[str, ...]
    tp_size: int  # ranks whose parts of a page stand side by side
    cache_scales: str = "the model's"  # or a fingerprint of the file that replaces them

    def objection(self, other: Identity) -> str:
        """Why pages cannot go from one to the other; empty: they can."""
        pairs = {field: (getattr(self, field), getattr(other, field)) for field in self.__struct_fields__}
        unlike = [f"{field} ({ours} and {theirs})" for field, (ours, theirs) in pairs.items() if ours != theirs]
        return f"The two engines differ in {', '.join(unlike)}; start both alike." if unlike else ""


class Claim(msgspec.Struct, frozen=True, tag=True):
    room: int
    identity: Identity
    have: int  # tokens that the decode engine has cached
    digest: bytes  # of the prompt
    request: Generate | None = None  # None: a router sends it
    neighbours: str = ""  # whose memory it can share; empty: pages go over the connection
    backend: str = "auto"
    gpus: tuple[str, ...] = ()  # UUIDs of those whose memory it can read, of neighbours


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the room any more."""

    room: int


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The decode engine has the pages of some memory, which need not be lent any more."""

    stamp: bytes


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Shows whether it can be sent, and that the scheduler which sends it lives."""

    room: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    group: int
    first: int  # page of the sequence
    count: int


class Loan(msgspec.Struct, frozen=True, array_like=True):
    """Where another engine finds memory that is lent, and what stands behind it until it is given back."""

    place: bytes
    stamp: bytes
    on_gpu: bytes = b""  # where pages are that stay on a GPU; their stamp stands alone then


class Pages(msgspec.Struct, frozen=True, tag=True):
    """The parts stand back to back in the second frame, or in memory that is lent (`transports`)."""

    room: int
    parts: list[Part]
    weight_version: str
    loan: Loan | None = None
    size: int = 0


class Done(msgspec.Struct, frozen=True, tag=True):
    """The prompt is computed. Seeds, penalties and grammars follow from the tokens."""

    room: int
    tokens: bytes  # int32: the first one of the answer, with what a grammar forces around it
    started: Started | None = None
    logprobs: LogprobRun | None = None
    more: bool = False  # forced ones follow, with their logprobs


class Failed(msgspec.Struct, frozen=True, tag=True):
    room: int
    reason: str
    status_code: int = 503
    err_type: str = UNAVAILABLE
    here: bool = False  # nothing is wrong: the decode engine computes the prompt


ToPrefill = Claim | Cancel | Mapped
ToDecode = Beat | Pages | Done | Failed


def digest_of(request: Request) -> bytes:
    """Tokens have the digests of images, namespaces the content of adapters; what images add is an engine's own."""
    namespace = request.namespace if request.adapter or request.media is None else ""
    return hashlib.blake2b(request.tokens.tobytes() + namespace.encode(), digest_size=16).digest()


def neighbours() -> str:
    """The same for processes that can open each other's memory: of one user, on one host, in one container."""
    return f"{os.getuid()} {Path('/proc/sys/kernel/random/boot_id').read_text()} {Path('/proc/self/ns/pid').readlink()}"
