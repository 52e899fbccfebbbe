"""Several ranks as one executor: the first sends what it is told to the others, and all do it in the same order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol, assert_never

import numpy as np
import torch

from bough.core.control import Command, CopyPagesIn, CopyPagesOut, RebalanceExperts, Ticket
from bough.core.errors import BoughError, EngineDeadError, SettingsError
from bough.core.plan import BatchPlan, Executor, InFlight, Limits, TokenMasks
from bough.core.settings import Settings
from bough.distributed.group import ALONE, RankGroup, open_group
from bough.distributed.topology import Topology
from bough.executor.build import resolve_device
from bough.messages.channels import Addresses
from bough.messages.ranks import CopyPages, LaunchPlan, Leave, RunCommand, SupplyMasks, ToRank, UseIdleTime

log = logging.getLogger(__name__)

NO_BUFFER = np.zeros((0, 0), dtype=np.uint8)  # what ranks copy out goes to that of the first
LOOK_IN_S = 0.1  # between two looks at what is in flight


def join_ranks(
    settings: Settings, rank: int, addresses: Addresses, dp_rank: int = 0, listener: int | None = None
) -> RankGroup:
    """This process as one rank of the replica with these addresses, on a GPU of its own where there are any."""
    parallel, device = settings.parallel, resolve_device(settings.model)
    size, wanted = parallel.tp_size, parallel.ranks_per_node
    if device.type == "cuda":
        if wanted > (there := torch.cuda.device_count()):
            raise SettingsError(
                f"--tp-size {size} and --dp-size {parallel.dp_size}: each rank needs a GPU, which makes {wanted} on "
                f"this host, and there are {there}."
            )
        torch.cuda.set_device((dp_rank * size + rank) % wanted)
    if size == 1:
        return ALONE
    return open_group(Topology(rank, size, parallel.ep_size), device, addresses, settings, listener)


class LeadingExecutor:
    """The first rank: `send` reaches all others. After every `rebalance_every` steps experts may move between ranks."""

    def __init__(self, own: Executor, send: Callable[[ToRank], None], rebalance_every: int = 0) -> None:
        self._own, self._send, self._rebalance_every = own, send, rebalance_every
        self._steps = 0
        self._rebalancing: Ticket | None = None

    def limits(self) -> Limits:
        return self._own.limits()

    def launch(self, plan: BatchPlan) -> InFlight:
        if self._rebalance_every:
            self._rebalance()
        self._send(LaunchPlan(plan))
        return self._own.launch(plan)

    def _rebalance(self) -> None:
        if self._rebalancing is not None and self._rebalancing.ready():
            try:
                log.info("experts were rebalanced: %s", self._rebalancing.wait().message)
            except EngineDeadError:
                raise
            except BoughError as error:  # and nothing has changed
                log.warning("experts could not be rebalanced: %s", error)
            self._rebalancing = None
        if self._steps and self._steps % self._rebalance_every == 0:
            self._rebalancing = self.control(RebalanceExperts())
        self._steps += 1

    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        self._send(SupplyMasks(step, masks))
        self._own.supply_masks(step, masks)

    def control(self, command: Command) -> Ticket:
        match command:
            case CopyPagesOut():
                self._send(CopyPages(command.pages, command.group))
            case CopyPagesIn():
                self._send(CopyPages(command.pages, command.group, command.buffer))
            case _:
                self._send(RunCommand(command))
        return self._own.control(command)

    def idle(self) -> bool:
        self._send(UseIdleTime())
        return self._own.idle()

    def close(self) -> None:
        self._send(Leave())
        self._own.close()


class Orders(Protocol):
    def receive(self, timeout_s: float | None) -> list[ToRank]: ...


def follow(executor: Executor, orders: Orders) -> None:
    """Any other rank: does what comes until it is told to leave. An error of a step is raised here within moments,
    because the ranks that wait for this one cannot tell why it does not come."""
    in_flight: deque[InFlight | Ticket] = deque()
    while True:
        for order in orders.receive(LOOK_IN_S if in_flight else None):
            match order:
                case LaunchPlan():
                    in_flight.append(executor.launch(order.plan))
                case SupplyMasks():
                    executor.supply_masks(order.step, order.masks)
                case RunCommand():
                    in_flight.append(executor.control(order.command))
                case CopyPages(pages=pages, group=group, content=content):
                    out = CopyPagesOut(pages, NO_BUFFER, group)
                    in_flight.append(executor.control(out if content is None else CopyPagesIn(pages, content, group)))
                case UseIdleTime():
                    executor.idle()
                case Leave():
                    executor.close()
                    return
                case _:
                    assert_never(order)
        while in_flight and in_flight[0].ready():
            try:
                in_flight.popleft().wait()
            except EngineDeadError:
                raise
            except BoughError as error:
                log.debug("no rank could do a command, as the first tells its sender: %s", error)
