"""How the ranks of an engine meet: sums, gathered columns, and what the first rank decides for all.

Every rank of a stage makes the same calls in the same order, because every rank is given the same plans. Stages pass
hidden states on and never wait for one behind them. `RankGroup` itself is a rank alone; `open_group` joins
processes of one host or of several.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from bough.core.errors import RankLostError
from bough.core.settings import Settings
from bough.distributed.topology import ONE_RANK, Topology
from bough.messages.channels import Addresses, own_address, split_address

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
Ranks = dist.ProcessGroup | None  # None: all
SIGNING_S = 3.0


class RankGroup:
    """A rank alone: its share is the whole."""

    topology = ONE_RANK
    doing = "the start"  # what the exchanges belong to, for errors
    turns_taken = 0  # steps and meetings of all attention groups

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of the stage; it may work in place."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, width] of each rank, side by side in the order of ranks."""
        return x

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], taken: Sequence[int]) -> torch.Tensor:
        """Rows for other ranks: the first `sent[0]` of x go to the first rank, and so on; `taken[0]` come from it."""
        return x

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """What the first rank of the stage has; it may work in place."""
        return x

    def pass_on(self, x: torch.Tensor) -> None:
        """Sends hidden states to the next stage, which may take its time to receive them."""

    def take_over(self, x: torch.Tensor) -> torch.Tensor:
        """What the stage before has passed on; it works in place."""
        return x

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """The smallest of each over all ranks of all stages."""
        return tuple(values)

    def of_each(self, value: int) -> tuple[int, ...]:
        """The values of all ranks of all stages and attention groups, each below 2 ** 62."""
        own, ranks = self.topology.rank, self.topology.ranks
        return self.all_groups.minimum([value if rank == own else 1 << 62 for rank in range(ranks)])

    @property
    def all_groups(self) -> RankGroup:
        """The ranks of all attention groups."""
        return self

    def meet(self, willing: bool, join: Callable[[], None]) -> bool:
        """Waits until all attention groups have come here, and runs an empty step with `join` as often as others run
        one meanwhile. Whether all were willing."""
        return willing

    def own_columns(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """This rank's part of what `all_gather` has made; all of it where it is no wider than that."""
        return x if x.shape[1] == width else x.narrow(1, self.topology.tp_rank * width, width)

    def all_say(self, yes: bool) -> bool:
        """Whether every rank says yes."""
        return all(self.minimum([yes]))

    def all_alike(self, yes: bool) -> bool:
        """Whether every rank says the same."""
        return any(self.minimum([yes, not yes]))


ALONE = RankGroup()


class SimulatedGroup(RankGroup):
    """The first of ranks of which the others are not there: shapes are right, values are not."""

    def __init__(self, size: int, ep_size: int = 1) -> None:
        self.topology = Topology(0, size, ep_size)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, self.topology.tp_size)


class Progress:
    """How many exchanges each rank of a host has begun, in a file that all of them see: the ranks of a stage begin the
    same ones, so a rank that has begun fewer keeps the others waiting."""

    def __init__(self, file: Path, topology: Topology) -> None:
        if not file.exists() or file.stat().st_size < 8 * topology.ranks:
            with file.open("ab") as empty:
                empty.truncate(8 * topology.ranks)
        self._begun = np.memmap(file, dtype=np.int64, mode="r+", shape=(topology.ranks,))
        self._rank, self._first = topology.rank, topology.rank - topology.tp_rank
        self._stage = slice(self._first, self._first + topology.tp_size)

    def count(self) -> None:
        self._begun[self._rank] += 1

    def late(self) -> list[int]:
        begun = self._begun[self._stage]
        found: list[int] = (np.flatnonzero(begun < begun.max()) + self._first).tolist()
        return found


class TorchGroup(RankGroup):
    """Ranks that meet through torch's process group, of which a process has one."""

    progress: Progress | None = None  # of ranks of one host

    def __init__(self, topology: Topology, device: torch.device, stage: Ranks = None, everyone: Ranks = None) -> None:
        """`stage` has the ranks of this one's stage, `everyone` those of all stages."""
        self.topology, self._device, self._stage, self._everyone = topology, device, stage, everyone
        self.place = topology  # for errors

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.topology.tp_size > 1:
            self._exchange("sum up", dist.all_reduce, x, dist.ReduceOp.SUM, self._stage)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.topology.tp_size)]
        self._exchange("gather", dist.all_gather, parts, x, self._stage)
        return torch.cat(parts, dim=1)

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], taken: Sequence[int]) -> torch.Tensor:
        out = x.new_empty((sum(taken), *x.shape[1:]))
        self._exchange("swap rows", dist.all_to_all_single, out, x.contiguous(), list(taken), list(sent), self._stage)
        return out

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        if self.topology.tp_size > 1:
            first = self.topology.rank - self.topology.tp_rank
            self._exchange("share tokens", dist.broadcast, x, first, self._stage)
        return x

    def pass_on(self, x: torch.Tensor) -> None:
        self._exchange("pass hidden states on", dist.send, x, self.topology.rank + self.topology.tp_size)

    def take_over(self, x: torch.Tensor) -> torch.Tensor:
        self._exchange("take hidden states over", dist.recv, x, self.topology.rank - self.topology.tp_size)
        return x

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        found = torch.tensor(values, dtype=torch.int64, device=self._device)
        self._exchange("agree", dist.all_reduce, found, dist.ReduceOp.MIN, self._everyone)
        return tuple(found.tolist())

    def _exchange(self, what: str, collective: Callable[..., object], *arguments: object) -> None:
        if self.progress is not None:
            self.progress.count()
        try:
            collective(*arguments)
        except RuntimeError as error:  # the other end was closed, or the time is up
            place = f"Rank {self.place.rank} of {self.place.ranks}"
            late = missing(arguments[-1]) if self.progress is None else self.progress.late()
            blame = f"; rank {', '.join(map(str, late))} did not come" if late else ""
            blame += f": {reason_of(error)}"
            raise RankLostError(f"{place} could not {what} with the others in {self.doing}{blame}") from error


def missing(ranks: Any) -> list[int]:
    """Of these ranks (a group, one rank, or all) those that do not wait for others as this one does: who gives up says
    so where all have found each other. Others may give up a little later."""
    store = dist.distributed_c10d._get_default_store()
    asked = [ranks] if isinstance(ranks, int) else dist.get_process_group_ranks(ranks)
    until = time.monotonic() + SIGNING_S
    try:
        store.set(f"waits{dist.get_rank()}", "")
        while True:
            absent = [rank for rank in asked if not store.check([f"waits{rank}"])]
            if len(absent) <= 1 or time.monotonic() > until:
                return absent
            time.sleep(0.05)
    except RuntimeError:  # the first rank's host has gone, and the store with it
        return []


class AttentionGroup(RankGroup):
    """The ranks of one of several attention groups. These take turns together: a turn is a step of all of them, or a
    meeting."""

    peers: RankGroup  # of each group the rank at this place
    turns: RankGroup  # the same, on the host
    everyone: RankGroup
    _counts: Sequence[int] = ()  # tokens of each group in this step
    _begun = False  # the turn of the next step has been taken
    at_step: Callable[[], None] = staticmethod(lambda: None)  # what all ranks of all groups do before a step

    @property
    def all_groups(self) -> RankGroup:
        return self.everyone

    def begin_step(self, tokens: int) -> None:
        """Tells the other groups how many tokens this one brings, and waits for them."""
        if not self._begun:
            self._take_turn(tokens)
        self._begun = False

    def meet(self, willing: bool, join: Callable[[], None]) -> bool:
        while (most := max(said := self._take_turn(-1 if willing else -2))) > 0:
            self._begun = True
            join()
        return most == min(said) == -1

    def _take_turn(self, says: int) -> list[int]:
        """What each group says: how many tokens it brings, or that it waits in a meeting and brings one of padding."""
        self.peers.doing = self.turns.doing = self.everyone.doing = self.doing
        said: list[int] = self.turns.all_gather(torch.tensor([[says]]))[0].tolist()
        self._counts = [max(tokens, 1) for tokens in said]
        self.turns_taken += 1
        if max(said) > 0:
            self.at_step()
        return said

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all groups."""
        most = max(self._counts)
        padded = torch.nn.functional.pad(x, (0, 0, 0, most - len(x)))
        parts = self.peers.all_gather(padded.reshape(1, -1)).view(-1, most, x.shape[1])
        return torch.cat([part[:count] for part, count in zip(parts, self._counts, strict=True)])

    def own_rows(self, x: torch.Tensor) -> torch.Tensor:
        """This group's part of what `gather_rows` has made."""
        before, own = sum(self._counts[: self.topology.dp_rank]), self._counts[self.topology.dp_rank]
        return x[before : before + own]


class TorchAttentionGroup(AttentionGroup, TorchGroup):
    def __init__(self, topology: Topology, device: torch.device, timeout: timedelta) -> None:
        groups = torch.arange(topology.ranks).view(topology.dp_size, topology.tp_size)
        own, peers, turns = (
            dist.new_subgroups_by_enumeration(ranks.tolist(), timeout, backend)[0]  # type: ignore[no-untyped-call]
            for ranks, backend in ((groups, None), (groups.T, None), (groups.T, "gloo"))
        )
        super().__init__(topology, device, own, own)
        across = Topology(topology.dp_rank, topology.dp_size)
        self.peers, self.turns = TorchGroup(across, device, peers), TorchGroup(across, torch.device("cpu"), turns)
        self.peers.place = self.turns.place = topology
        self.everyone = TorchGroup(topology.all_groups, device)


def open_group(
    topology: Topology, device: torch.device, addresses: Addresses, settings: Settings, listener: int | None = None
) -> RankGroup:
    """Waits for the other ranks, which open it with the same addresses; the first one's `listener` is for the store
    through which several hosts find each other."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    rank, size, timeout = topology.rank, topology.ranks, timedelta(seconds=settings.parallel.dist_timeout)
    folder = addresses.folder if topology.dp_size == 1 else Path(addresses.home)
    interface, way = LOOPBACK, dict[str, Any](init_method=(folder / "ranks").as_uri())
    try:
        if addresses.store:
            patience = timedelta(seconds=settings.process.start_timeout_s)  # hosts start at different times
            interface, way = interface_to(addresses.store), _meet(addresses.store, rank, size, patience, listener)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)  # nobody elsewhere takes part
        dist.init_process_group(backend, timeout=timeout, world_size=size, rank=rank, **way)
        of_stage = None
        if topology.pp_size > 1 and topology.tp_size > 1:
            ranks = [list(range(first, first + topology.tp_size)) for first in range(0, size, topology.tp_size)]
            of_stage, _ = dist.new_subgroups_by_enumeration(ranks, timeout)  # type: ignore[no-untyped-call]
        if topology.dp_size > 1:
            return TorchAttentionGroup(topology, device, timeout)
    except (RuntimeError, OSError) as error:
        raise RankLostError(f"Rank {rank} of {size} did not find the others: {error}") from error
    group = TorchGroup(topology, device, of_stage)
    group.progress = None if addresses.store else Progress(folder / "progress", topology)
    return group


def _meet(address: str, rank: int, size: int, patience: timedelta, listener: int | None) -> dict[str, Any]:
    store = dist.TCPStore(  # type: ignore[attr-defined]
        *split_address(address), size, rank == 0, patience, wait_for_workers=False, master_listen_fd=listener
    )
    store.set(f"rank{rank}", "here")
    store.wait([f"rank{other}" for other in range(size)], patience)
    return {"store": store}


def reason_of(error: object) -> str:
    """Without the place in gloo's source."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error))


def interface_to(address: str) -> str:
    """The one from which this host reaches the address."""
    own, cards = own_address(address), psutil.net_if_addrs().items()
    return next(name for name, entries in cards if any(own == entry.address.split("%")[0] for entry in entries))
