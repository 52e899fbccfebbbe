"""The ranks of an engine: the first in the scheduler's process, each other an executor in a process of its own."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zmq

from bough.core.garbage import settle_garbage
from bough.core.settings import Settings
from bough.executor.load_model import LoadedModel
from bough.executor.ranks import LeadingExecutor, follow, join_ranks
from bough.launch.spec import ChildSpec, in_gib
from bough.messages.channels import Receiver, Sender
from bough.messages.ranks import ToRank, pack_array, unpack_array
from bough.observability.logs import set_up_logging

BuildExecutor = Callable[..., LoadedModel]


def lead_ranks(spec: ChildSpec, settings: Settings, context: zmq.Context[Any], build: BuildExecutor) -> LoadedModel:
    """All ranks as one executor."""
    group = join_ranks(settings, 0, spec.addresses, spec.dp_rank or 0, spec.listeners.get(spec.addresses.store))
    loaded = build(spec.files, settings, group)
    if not spec.addresses.ranks:  # one of several replicas
        return loaded
    sender = Sender(context, *spec.addresses.ranks, pack=pack_array, listeners=spec.listeners, key=spec.cluster_key)
    parallel = settings.parallel
    every = parallel.eplb_rebalance_num_iterations if parallel.enable_eplb else 0
    return replace(loaded, executor=LeadingExecutor(loaded.executor, sender.send, every))


def run_rank(spec: ChildSpec, announce: Callable[..., None]) -> None:
    settings = spec.parse_settings()
    set_up_logging(spec.title, settings.process.log_level)
    context: zmq.Context[Any] = zmq.Context()
    address = spec.addresses.ranks[spec.rank - 1]
    orders: Receiver[ToRank] = Receiver(context, address, ToRank, unpack=unpack_array, key=spec.cluster_key)
    module, _, function = spec.executor.partition(":")
    build: BuildExecutor = getattr(importlib.import_module(module), function)
    gc.freeze()
    gc.enable()
    loaded = build(spec.files, settings, join_ranks(settings, spec.rank, spec.addresses, spec.dp_rank or 0))
    settle_garbage()
    announce(ready={"weight": in_gib(loaded.weight_bytes)})
    follow(loaded.executor, orders)
    context.destroy(linger=0)
