"""The ranks of an engine: the first in the scheduler's process, each other an executor in a process of its own."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import zmq

from bough.core.child_environment import settle_garbage
from bough.core.plan import StepResult
from bough.core.settings import Settings
from bough.executor.host_memory import own_memory
from bough.executor.load_model import LoadedModel
from bough.executor.lockstep import LockstepExecutor
from bough.executor.ranks import LeadingExecutor, Reporter, Results, follow, join_ranks, topology_of
from bough.launch.spec import ChildSpec
from bough.messages.channels import Receiver, Sender
from bough.messages.ranks import ToRank, pack_array, unpack_array
from bough.observability.logs import set_up_logging

BuildExecutor = Callable[..., LoadedModel]


def lead_ranks(spec: ChildSpec, settings: Settings, context: zmq.Context[Any], build: BuildExecutor) -> LoadedModel:
    """All ranks as one executor."""
    group = join_ranks(settings, 0, spec.addresses, spec.dp_rank or 0, spec.listeners.get(spec.addresses.store))
    loaded = build(spec.files, settings, group)
    loaded = replace(loaded, rank_weight_bytes=group.of_each(loaded.weight_bytes))
    parallel, results, ways = settings.parallel, None, spec.addresses
    if ways.ranks:  # else this is one of several replicas
        listeners, key = spec.listeners, spec.cluster_key
        sender = Sender(context, *ways.ranks, pack=pack_array, listeners=listeners, key=key)
        if parallel.pp_size > 1:
            more = (None, unpack_array, listeners, key)
            receiver: Receiver[StepResult] = Receiver(context, ways.results, StepResult, *more)
            results = Results(receiver.receive, parallel.dist_timeout)
        leader = LeadingExecutor(loaded.executor, sender.send, results)
        leader.host = own_memory(leader.limits(), settings, group)
        loaded = replace(loaded, executor=leader, host=leader.host)
    if parallel.groups > 1:
        tell = Sender(context, *spec.beside, key=spec.cluster_key).send
        loaded = replace(loaded, executor=LockstepExecutor(loaded.executor, group, tell))
    return loaded


def run_rank(spec: ChildSpec, announce: Callable[..., None]) -> None:
    settings = spec.parse_settings()
    parallel, level = settings.parallel, settings.process.log_level
    if level != "debug" and spec.rank % parallel.tp_size and spec.rank % parallel.ranks_per_node:
        level = "error"  # the first of its stage on this host says the same
    set_up_logging(spec.title, level)
    context: zmq.Context[Any] = zmq.Context()
    address = spec.addresses.ranks[spec.rank - 1]
    orders: Receiver[ToRank] = Receiver(context, address, ToRank, unpack=unpack_array, key=spec.cluster_key)
    build: BuildExecutor = resolve_name(spec.executor)
    gc.freeze()
    gc.enable()
    group = join_ranks(settings, spec.rank, spec.addresses, spec.dp_rank or 0)
    loaded = build(spec.files, settings, group)
    group.of_each(loaded.weight_bytes)  # the first one tells them
    host = own_memory(loaded.executor.limits(), settings, group)
    place, report = topology_of(settings, spec.rank), None
    if place.is_last and not place.is_first and place.tp_rank == 0:
        report = Reporter(Sender(context, spec.addresses.results, pack=pack_array, key=spec.cluster_key).send)
    settle_garbage()
    announce(ready={})
    follow(loaded.executor, orders, report, host)
    context.destroy(linger=0)
