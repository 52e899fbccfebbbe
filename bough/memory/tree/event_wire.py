"""How cache events travel: the settings of a publisher and the batch that one message carries.

Written here, below both ends: the engine publishes (`bough.launch.kv_events`), routers subscribe (`bough.gateway`).
A message has three frames: topic, sequence number (8 bytes, big-endian), and the msgpack of a `KVEventBatch`.
"""

from __future__ import annotations

import msgspec

from bough.core.errors import SettingsError
from bough.memory.tree.events import KVEvent

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class PublisherConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--kv-events-config`, as JSON."""

    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""


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
