"""What the cache reports: which blocks it stored and removed, by a hash that names their whole prefix.

A block is one page of tokens. Its hash covers the block, all blocks before it and the namespace, so engines that cached
the same prefix announce the same hash. The tree makes these events only if somebody listens. On the wire an event is
what SGLang's subscribers read: an array of its name and its fields, hashes as signed 64-bit numbers; `namespace` stands
last.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TypeAlias

import msgspec

from bough.memory.tree.node import Namespace

HASH_BYTES = 8
DEVICE = "GPU"  # what subscribers call the tier that the model reads from, whatever the device is


class BlockStored(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Consecutive blocks entered the cache, below the block `parent_block_hash` (None: at the start of a prompt)."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = DEVICE
    namespace: Namespace = ""


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These blocks left the cache."""

    block_hashes: tuple[int, ...]
    medium: str | None = DEVICE


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The cache is empty."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def hash_blocks(tokens: bytes, block_bytes: int, parent: int | None, namespace: Namespace) -> tuple[int, ...]:
    """The chained hash of each block of `tokens`; `parent` is the hash of the block before, None at the start."""
    if parent is None:
        link = blake2b(namespace.encode(), digest_size=HASH_BYTES).digest()
    else:
        link = parent.to_bytes(HASH_BYTES, "big", signed=True)
    hashes: list[int] = []
    for start in range(0, len(tokens), block_bytes):
        link = blake2b(link + tokens[start : start + block_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(int.from_bytes(link, "big", signed=True))
    return tuple(hashes)
