"""Several ranks as one executor: the first sends what it is told to the others, and all do it in the same order. The
last stage of a pipeline sends the results of steps to the first rank."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np
import torch

from bough.core.control import Command, CopyPagesIn, CopyPagesOut, Ticket
from bough.core.errors import BoughError, EngineDeadError, RankLostError, RequestError, SettingsError
from bough.core.plan import BatchPlan, Executor, HostMemory, InFlight, Limits, StepResult, TokenMasks
from bough.core.settings import Settings
from bough.distributed.group import ALONE, RankGroup, open_group
from bough.distributed.topology import Topology
from bough.executor.build import resolve_device
from bough.executor.threaded import Running
from bough.messages.channels import Addresses, Receiver
from bough.messages.ranks import CopyPages, LaunchPlan, Leave, RunCommand, SupplyMasks, ToRank, UseIdleTime

log = logging.getLogger(__name__)

NO_BUFFER = np.zeros((0, 0), dtype=np.uint8)  # what ranks copy out goes to that of the first
LOOK_IN_S = 0.1  # between two looks at what is in flight


def join_ranks(
    settings: Settings, rank: int, addresses: Addresses, dp_rank: int = 0, listener: int | None = None
) -> RankGroup:
    """This process as one rank of the replica with these addresses, on a GPU of its own where there are any."""
    parallel, place, device = settings.parallel, topology_of(settings, rank, dp_rank), resolve_device(settings.model)
    if device.type == "cuda":
        wanted, there = parallel.ranks_per_node, torch.cuda.device_count()
        if wanted > there:
            raise SettingsError(
                f"--tp-size {parallel.tp_size}, --pp-size {parallel.pp_size} and --dp-size {parallel.dp_size}: each "
                f"rank needs a GPU, which makes {wanted} on this host, and there are {there}."
            )
        torch.cuda.set_device((dp_rank * parallel.replica_ranks + rank) % wanted)
    return ALONE if place.ranks == 1 else open_group(place, device, addresses, settings, listener)


def topology_of(settings: Settings, rank: int, dp_rank: int = 0) -> Topology:
    parallel = settings.parallel
    place = Topology.at(rank, parallel.tp_size // parallel.groups, parallel.pp_size, parallel.ep_size)
    return place if parallel.groups == 1 else replace(place, dp_rank=dp_rank, dp_size=parallel.groups)


class Results:
    """What the last stage of a pipeline has sent: `receive` waits so many seconds for more."""

    def __init__(self, receive: Callable[[float], list[StepResult]], timeout_s: float) -> None:
        self._receive, self._timeout_s = receive, timeout_s
        self._arrived: dict[int, StepResult] = {}

    def has(self, step: int, wait_s: float = 0.0) -> bool:
        if step not in self._arrived:
            self._arrived |= {result.step: result for result in self._receive(wait_s)}
        return step in self._arrived

    def take(self, step: int) -> StepResult:
        if not self.has(step) and not self.has(step, self._timeout_s):  # they come in order: the next is the one
            late = f"within {self._timeout_s:g} s (--dist-timeout)"
            raise RankLostError(f"The last stage has not sent the result of step {step} {late}.")
        return self._arrived.pop(step)


@dataclass(frozen=True, slots=True)
class PipelinedStep:
    """The first stage's part of a step, with the result of the last."""

    own: InFlight
    step: int
    results: Results

    def ready(self) -> bool:
        return self.own.ready() and self.results.has(self.step)

    def wait(self) -> StepResult:
        span = self.own.wait().device_span  # by the clock of this host
        return replace(self.results.take(self.step), device_span=span)


class LeadingExecutor:
    """The first rank: `send` reaches all others. `results` are those of a pipeline's last stage."""

    def __init__(self, own: Executor, send: Callable[[ToRank], None], results: Results | None = None) -> None:
        self._own, self._send, self._results = own, send, results
        self.host: HostMemory = ()  # for this rank's part of pages; each other has its own
        self._copied_out: Ticket | None = None  # the last

    def limits(self) -> Limits:
        return self._own.limits()

    def launch(self, plan: BatchPlan) -> InFlight:
        self._send(LaunchPlan(plan))
        own = self._own.launch(plan)
        return own if self._results is None else PipelinedStep(own, plan.step, self._results)

    def drafted(self, step: int) -> BatchPlan:
        return self._own.drafted(step)

    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        self._send(SupplyMasks(step, masks))
        self._own.supply_masks(step, masks)

    def control(self, command: Command) -> Ticket:
        if isinstance(command, CopyPagesOut | CopyPagesIn):
            if any(command.buffer is each for each in self.host):
                inward = isinstance(command, CopyPagesIn)
                self._send(CopyPages(command.pages, command.group, slots=command.slots, inward=inward))
                return self._own.control(command)
            if self._results is not None:
                raise RequestError("Pages of a pipeline cannot be copied: each stage has a part of them.")
        match command:
            case CopyPagesOut():
                self._send(CopyPages(command.pages, command.group))
                self._copied_out = self._own.control(command)
                return self._copied_out
            case CopyPagesIn():
                if self._copied_out is not None:  # what is sent must have been written
                    self._copied_out.wait()
                content = command.buffer if command.slots is None else command.buffer[command.slots]
                self._send(CopyPages(command.pages, command.group, content, inward=True))
            case _:
                self._send(RunCommand(command))
        return self._own.control(command)

    def idle(self, busy: bool = False) -> bool:
        self._send(UseIdleTime(busy))
        return self._own.idle(busy)

    def close(self) -> None:
        self._send(Leave())
        self._own.close()


class Reporter:
    """Sends the result of each step as soon as there is one: a thread waits for it."""

    def __init__(self, send: Callable[[StepResult], None]) -> None:
        self._send, self._thread = send, ThreadPoolExecutor(1, "results")

    def __call__(self, step: InFlight) -> Running[None]:
        return Running(self._thread.submit(lambda: self._send(step.wait())))


def follow(executor: Executor, orders: Receiver[ToRank], report: Reporter | None = None, host: HostMemory = ()) -> None:
    """Any other rank: does what comes until it is told to leave. An error of a step is raised here within moments,
    because the ranks that wait for this one cannot tell why it does not come."""
    in_flight: deque[InFlight | Ticket | Running[None]] = deque()
    while True:
        for order in orders.receive(LOOK_IN_S if in_flight else None):
            match order:
                case LaunchPlan():
                    step = executor.launch(order.plan)
                    in_flight.append(step if report is None else report(step))
                case SupplyMasks():
                    executor.supply_masks(order.step, order.masks)
                case RunCommand():
                    in_flight.append(executor.control(order.command))
                case CopyPages(pages=pages, group=group, content=content, slots=slots):
                    # Never beside later plans: only the first rank's ticket tells when pages may be used again.
                    copy = CopyPagesIn if order.inward else CopyPagesOut
                    buffer = (NO_BUFFER if slots is None else host[group]) if content is None else content
                    in_flight.append(executor.control(copy(pages, buffer, group, slots)))
                case UseIdleTime():
                    executor.idle(order.busy)
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
                log.warning("no rank has done a command, as the first tells its sender; here: %s", error)
