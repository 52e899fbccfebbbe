"""What an executor can be told beside its plans: to copy pages, swap weights, give memory back, record a profile.

`Executor.control(command)` returns a ticket at once. The command runs after every plan launched before it and before
every later one. The caller holds what it touches (pages, a buffer) until the ticket is ready. A command that cannot be
done raises a `BoughError` from `wait` and has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypeVar

import msgspec

from bough.core.errors import RequestError

if TYPE_CHECKING:  # clients start without it
    import numpy as np
    import numpy.typing as npt

MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
WEIGHTS_GROUP = "weight_update_group"


def memory_tags(tags: Sequence[str] | None) -> tuple[MemoryTag, ...]:
    """Which memory is meant; all of it where nothing is named."""
    unknown = [tag for tag in tags or () if tag not in MEMORY_TAGS]
    if unknown:
        raise RequestError(f"tags must be among {', '.join(MEMORY_TAGS)}, got {unknown[0]!r}.", field="tags")
    return tuple(tag for tag in MEMORY_TAGS if not tags or tag in tags)


class CopyPagesOut(msgspec.Struct, frozen=True, tag=True):
    """Copies what pages hold, all layers together and the parts of all ranks side by side, to memory of the host, or to
    a tensor of the one rank's GPU. Where each rank has memory for its own part, the buffer is the first one's."""

    pages: npt.NDArray[np.int32]  # [n]
    buffer: npt.NDArray[np.uint8]  # [n, Limits.copied_bytes of the group], written until the ticket is ready
    group: int = 0
    slots: npt.NDArray[np.int32] | None = None  # [n] where in a longer buffer each page goes; None: in their order
    # Later plans need not wait: they leave the pages as they are until the ticket is ready.
    beside: bool = False


class CopyPagesIn(msgspec.Struct, frozen=True, tag=True):
    """Gives pages the content that `CopyPagesOut` has copied."""

    pages: npt.NDArray[np.int32]  # [n]
    buffer: npt.NDArray[np.uint8]  # [n, Limits.copied_bytes of the group], read until the ticket is ready
    group: int = 0
    slots: npt.NDArray[np.int32] | None = None  # [n] where in a longer buffer each page stands


class SwapWeights(msgspec.Struct, frozen=True, tag=True):
    """Reads another checkpoint of the same configuration in the place of the present one. What pages hold stays."""

    model_path: str
    load_format: str | None = None  # None: what its files hold


class TakeTensors(msgspec.Struct, frozen=True, tag=True):
    """Gives the tensors of the model that files hold, by the checkpoint's names, other values: all, or none."""

    files: tuple[str, ...]  # safetensors of this user


class ReceiveTensors(msgspec.Struct, frozen=True, tag=True):
    """The same with tensors that a trainer sends in this order to a group that `JoinTrainer` has made."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], ...]
    group_name: str = WEIGHTS_GROUP


class GroupPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the trainer waits, which is rank 0 of the group; the engine's ranks follow from `rank_offset` on."""

    master_address: str
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1)]
    world_size: Annotated[int, msgspec.Meta(ge=2)]
    group_name: str = WEIGHTS_GROUP
    backend: Literal["gloo", "nccl"] | None = None  # None: nccl on GPUs, gloo on CPUs


class JoinTrainer(GroupPlace, frozen=True, tag=True):
    """Makes a group with a trainer."""


class LeaveTrainer(msgspec.Struct, frozen=True, tag=True):
    group_name: str = WEIGHTS_GROUP


class ReadWeight(msgspec.Struct, frozen=True, tag=True):
    """The ticket's message is the first rows of a tensor, as JSON."""

    name: str
    truncate_size: Annotated[int, msgspec.Meta(ge=0)] = 100


class SetVersion(msgspec.Struct, frozen=True, tag=True):
    """Changes nothing but what the engine says of itself."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Gives memory back. What pages hold is lost with `kv_cache`. No plan may be launched before `Wake`."""

    tags: tuple[MemoryTag, ...] = MEMORY_TAGS


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Takes memory that was given back again; weights are read again from the files they came from."""

    tags: tuple[MemoryTag, ...] = MEMORY_TAGS


class ProfileStart(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Begins to record what the executor's process does."""

    output_dir: str | None = None
    activities: tuple[str, ...] = ()  # CPU, GPU; what the machine has when left out
    with_stack: bool = False
    record_shapes: bool = False


class ProfileStop(msgspec.Struct, frozen=True, tag=True):
    """Ends the recording; the ticket's message is the path of its file."""


class RecordExperts(msgspec.Struct, frozen=True, tag=True):
    """Counts how often each expert is chosen, from `start` to `stop`; the message of `dump` is the counts, as JSON."""

    action: Literal["start", "stop", "dump"]


class Decline(msgspec.Struct, frozen=True, tag=True):
    """Stands for a command that this scheduler refuses; the other attention groups then leave it, too."""

    reason: str


class MeetGroups(msgspec.Struct, frozen=True, tag=True):
    """Waits for the other attention groups before this one leaves."""


ADAPTER_FILES = "adapter_config.json", "adapter_model.safetensors"


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Begins to read an adapter on a thread, beside later plans; `LoadAdapter` then finds it read."""

    name: str
    path: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Reads an adapter into the host's memory; without a path it is forgotten, and no later plan has rows of it."""

    name: str
    path: str | None


class PlaceAdapter(msgspec.Struct, frozen=True, tag=True):
    """Puts a loaded adapter into a slot, in the place of what stood there: rows of that slot compute with it."""

    name: str
    slot: int  # from 1 on


AdapterCommand = ReadAdapter | LoadAdapter | PlaceAdapter
WeightsCommand = SwapWeights | TakeTensors | ReceiveTensors | SetVersion
TrainerCommand = JoinTrainer | LeaveTrainer
# What clients send through the scheduler.
ClientCommand = WeightsCommand | TrainerCommand | ReadWeight | Sleep | Wake | RecordExperts
GroupCommand = ClientCommand | Decline | MeetGroups  # that all attention groups begin together
Command = GroupCommand | AdapterCommand | CopyPagesOut | CopyPagesIn | ProfileStart | ProfileStop


class CommandResult(msgspec.Struct, frozen=True):
    message: str = ""
    obstacle: str = ""  # why no plan can run from now on, and what to do; empty: plans can run
    seconds: float | None = None  # that a copy of pages took, waiting left out; None: not measured
    content: str = ""  # of an adapter that was loaded: what its numbers hash to
    lost: bool = False  # tensors that had come since the files were read are gone
    done: Callable[[], bool] | None = None  # whether what was begun, and goes on beside later plans, has ended


T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """What an executor has begun, and what comes of it."""

    def ready(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> T_co: ...


Ticket = Pending[CommandResult]
