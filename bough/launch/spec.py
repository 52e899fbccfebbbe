"""What a child process is told when it starts: one line of JSON on its standard input."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from bough.core.parallel_settings import ParallelSettings
from bough.core.settings import Settings
from bough.loader.locate import ModelFiles
from bough.messages.channels import Addresses
from bough.server.model_info import ModelInfo

STACK_SIGNAL = signal.SIGUSR1  # has a child print the stacks of its threads, even one that is stuck
Role = Literal["scheduler", "detokenizer", "server", "executor"]
MODEL_EXECUTOR = "bough.executor.build:build_executor"  # what runs plans, as module:function; benchmarks have another


@dataclass(frozen=True, slots=True)
class ServerSpec:
    number: int  # of its client
    listener_fd: int
    model: ModelInfo
    replicas: tuple[Addresses, ...]


@dataclass(frozen=True, slots=True)
class ChildSpec:
    role: Role
    settings: dict[str, Any]
    addresses: Addresses
    files: ModelFiles
    server: ServerSpec | None = None
    executor: str = MODEL_EXECUTOR
    rank: int = 0  # of an executor beside the scheduler's own
    listeners: dict[str, int] = field(default_factory=dict)  # descriptors, by the address that other hosts connect to
    cluster_key: str = field(default="", repr=False)
    dp_rank: int | None = None  # of a replica among several
    beside: tuple[str, ...] = ()  # the schedulers of the others

    @property
    def title(self) -> str:
        """What the process is called."""
        replica = "" if self.dp_rank is None else f" DP{self.dp_rank}"
        stage, rank = divmod(self.rank, self.settings.get("tp_size", 1))
        place = f" PP{stage} TP{rank}" if self.settings.get("pp_size", 1) > 1 else f" TP{rank}"
        return self.role + replica + (place if self.rank else "")

    def encode(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> ChildSpec:
        return msgspec.json.decode(line, type=cls, dec_hook=lambda kind, value: Path(value))

    def parse_settings(self) -> Settings:
        return Settings.from_flat(self.settings)


def replica_specs(
    settings: Settings, replicas: Sequence[Addresses], number: int, files: ModelFiles, executor: str, key: str = ""
) -> list[ChildSpec]:
    """The processes of one replica on this host, of those with these addresses; the scheduler comes first."""
    parallel, own = settings.parallel, replicas[number]
    here = parallel.replica_ranks if parallel.groups > 1 else parallel.replica_ranks // parallel.nnodes
    roles: list[tuple[Role, int]] = [("scheduler", 0), ("detokenizer", 0)]
    roles += [("executor", rank) for rank in range(1, here)]
    dp_rank = number if len(replicas) > 1 else None
    beside = tuple(each.scheduler for each in replicas if each != own)
    more: dict[str, Any] = {"executor": executor, "dp_rank": dp_rank, "beside": beside, "cluster_key": key}
    return [ChildSpec(role, settings.to_flat(), own, files, rank=rank, **more) for role, rank in roles]


def of_groups(folder: Path, placed: Addresses, here: range, parallel: ParallelSettings) -> list[Addresses]:
    """All attention groups as this host sees them, which has those with numbers in `here`. The rest end elsewhere."""
    found = []
    for number, scheduler in enumerate(placed.schedulers):
        (own := folder / f"dp{number}").mkdir(exist_ok=True)
        each = Addresses.in_folder(folder, 0, parallel.replica_ranks, own)
        text = each.detokenizer if number in here else ""
        found.append(replace(each, scheduler=scheduler, detokenizer=text, clients=placed.clients, store=placed.store))
    return found
