"""What the cache reports: which blocks it stored and removed, by a hash that names their whole prefix.

A block is one page of tokens. Its hash covers the block, all blocks before it and the namespace, so engines that cached
the same prefix announce the same hash. The tree makes these events only if somebody listens: the engine publishes them
(`bough.launch.kv_events`), routers subscribe (`bough.gateway`). On the wire an event is what SGLang's subscribers read:
an array of its name and its fields, hashes as signed 64-bit numbers; `namespace` stands last. A message has three
frames: topic, sequence number (8 bytes, big-endian), and the msgpack of a `KVEventBatch`.
"""

import ipaddress
from hashlib import blake2b
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from bough.core.errors import SettingsError
from bough.memory.tree.node import Namespace

FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that there is an inverse
SPREAD = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)  # that of SplitMix64
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
# What SGLang's subscribers call the tier that the model reads from, whatever the device is, and those below it.
DEVICE, HOST, DISK, EXTERNAL = "GPU", "CPU_PINNED", "DISK", "EXTERNAL"


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
    """The chained hash of each block of `tokens`; `parent` is the hash of the block before, None at the start.

    Modulo 2^64 it is `FACTOR` times the hash before, plus a number that the block's tokens and their places within it
    give: such a chain is computed for all blocks at once. With one Python hash a block, a page size of 1 would take
    longer than the scheduler's turn."""
    if parent is None:
        parent = int.from_bytes(blake2b(namespace.encode(), digest_size=8).digest(), "big", signed=True)
    numbers = np.frombuffer(tokens, np.uint32).reshape(-1, block_bytes // 4) + np.arange(block_bytes // 4) * (1 << 32)
    mixed = numbers.astype(np.uint64) + SPREAD[0]
    for shift, factor in ((30, SPREAD[1]), (27, SPREAD[2])):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * factor
    steps = np.full(len(mixed), FACTOR).cumprod()
    back = np.full(len(mixed), pow(int(FACTOR), -1, 1 << 64), dtype=np.uint64).cumprod()
    found = steps * (
        np.uint64(parent % (1 << 64)) + (mixed.sum(axis=1, dtype=np.uint64) * back).cumsum(dtype=np.uint64)
    )
    return tuple(found.view(np.int64).tolist())


# ---- the wire


class PublisherConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--kv-events-config`, as JSON."""

    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"  # events carry the tokens of prompts, so other machines must be asked for
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, msgspec.Meta(ge=0)] = 10_000
    hwm: Annotated[int, msgspec.Meta(ge=1)] = 100_000  # 0 would be no limit: a subscriber could fill the memory
    topic: str = ""
    key_file: str | None = None  # see `event_key`: subscribers must hold the same file


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one turn of the scheduler."""

    ts: float
    events: list[KVEvent]
    attn_dp_rank: int = 0


def parse_config(text: str) -> PublisherConfig:
    try:
        config = msgspec.json.decode(text, type=PublisherConfig)
    except msgspec.MsgspecError as error:
        raise SettingsError(f"--kv-events-config: {error}.") from None
    if config.publisher != "zmq":
        raise SettingsError(f"--kv-events-config: the publisher must be 'zmq', got {config.publisher!r}.")
    return config


def is_exposed(endpoint: str) -> bool:
    """Whether other machines may be able to reach it."""
    scheme, _, rest = endpoint.partition("://")
    if scheme in ("ipc", "inproc"):
        return False
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:  # *, or the name of an interface
        return host != "lo"
