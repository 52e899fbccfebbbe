"""How cache events travel: the settings of a publisher and the batch that one message carries.

Written here, below both ends: the engine publishes (`bough.launch.kv_events`), routers subscribe (`bough.gateway`).
A message has three frames: topic, sequence number (8 bytes, big-endian), and the msgpack of a `KVEventBatch`.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec

from bough.core.errors import SettingsError
from bough.memory.tree.events import KVEvent

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


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
