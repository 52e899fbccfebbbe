"""What commands do to a model in memory: its weights, its pages and the profiler. All executors share it.

What an executor has made for certain addresses (captured graphs, tapes) is its own: it is told when to drop that, and
when all memory is there again.
"""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, assert_never

import torch
from torch.profiler import ProfilerActivity

from bough.core import control as commands
from bough.core.control import MEMORY_TAGS, Command, CommandResult, MemoryTag
from bough.core.errors import BoughError, EngineDeadError, RankLostError, RequestError
from bough.distributed.group import ALONE, AttentionGroup, RankGroup
from bough.executor.adapters import AdapterStore
from bough.executor.weights import WeightStore
from bough.memory.pools.kv_pool import KVPool

log = logging.getLogger(__name__)
T = TypeVar("T")


def nothing() -> None:
    """For executors that keep no addresses, or have nothing to count."""


def _alike(group: RankGroup, name: str, act: Callable[[], T]) -> T:
    """What `act` returns. Ranks of which only some could do it are of no use any more."""
    try:
        result = act()
    except BoughError as error:
        if not group.all_alike(False):
            raise RankLostError(f"This rank could not do {name}, which another has done: {error}") from error
        raise
    if not group.all_alike(True):
        raise RankLostError(f"Another rank could not do {name}, which this one has done.")
    return result


class ModelControl:
    """Does commands on the calling thread. `join` takes part in a step of other attention groups. `drop` is called
    before addresses change, `rebuild` when they hold again."""

    def __init__(
        self,
        weights: WeightStore | None,
        pool: KVPool,
        group: RankGroup = ALONE,
        *,
        join: Callable[[], None] = nothing,
        drop: Callable[[], None] = nothing,
        rebuild: Callable[[], None] = nothing,
        adapters: AdapterStore | None = None,
    ) -> None:
        """Without `weights`, as in a rehearsal, they can be neither swapped nor released."""
        self._weights, self._pool, self._drop, self._rebuild = weights, pool, drop, rebuild
        self._group, self._join, self._adapters = group, join, adapters
        self._profiler = TorchProfiler()
        self._asleep: set[MemoryTag] = set()
        self._steps, self._every = 0, 0 if weights is None else weights.rebalance_every
        self.begin_step = self._count_step if self._every else nothing  # before each of the scheduler's
        if isinstance(group, AttentionGroup):  # whose turns count the steps that others have begun, too
            group.at_step, self.begin_step = self.begin_step, nothing

    @property
    def asleep(self) -> bool:
        return bool(self._asleep)

    def run(self, command: Command) -> CommandResult:
        name = self._group.doing = f"the command {type(command).__name__}"
        if isinstance(command, commands.ReadAdapter | commands.PlaceAdapter):  # which cannot fail: ranks need not agree
            return self._run(command)
        together = isinstance(command, commands.GroupCommand)

        def act() -> CommandResult:
            if together and not self._group.meet(not isinstance(command, commands.Decline), self._join):
                why = command.reason if isinstance(command, commands.Decline) else "Another replica refuses it."
                raise RequestError(why)
            return self._run(command)

        return _alike(self._group.all_groups if together else self._group, name, act)

    @torch.inference_mode(False)
    def _count_step(self) -> None:
        """All ranks run the same steps, so all find at once that experts are to move."""
        assert self._weights is not None
        if self._steps and self._steps % self._every == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # steps in flight read what moves
            try:
                said = _alike(self._group.all_groups, "the move of experts", self._weights.rebalance)
                log.info("experts were rebalanced: %s", said)
            except EngineDeadError:
                raise
            except BoughError as error:  # and nothing has changed
                log.warning("experts could not be rebalanced: %s", error)
        self._steps += 1

    def _run(self, command: Command) -> CommandResult:
        message, began, lost = "", time.monotonic(), False
        match command:
            case commands.SwapWeights():
                message = self._swap(command)
            case commands.TakeTensors() | commands.ReceiveTensors():
                weights = self._awake_weights()
                source = weights.live.open(command, weights.slots)
                with self._moving(weights):
                    message = weights.patch(source)
            case commands.JoinTrainer() | commands.LeaveTrainer():
                assert self._weights is not None
                message = self._weights.live.change_group(command)
            case commands.ReadWeight():
                weights = self._awake_weights()
                message = weights.live.read(command, weights.slots)
            case commands.Sleep():
                message = self._sleep([tag for tag in command.tags if tag not in self._asleep])
            case commands.Wake():
                message, lost = self._wake([tag for tag in command.tags if tag in self._asleep])
            case commands.CopyPagesOut():
                content = self._pool.groups[command.group].read_pages(torch.from_numpy(command.pages))
                if command.buffer.shape[1] != content.shape[1]:
                    content = self._group.all_gather(content)
                if command.buffer.size:  # the first rank has one
                    command.buffer[slice(None) if command.slots is None else command.slots] = content.numpy()
            case commands.CopyPagesIn():
                content = torch.from_numpy(command.buffer if command.slots is None else command.buffer[command.slots])
                pages, pool = torch.from_numpy(command.pages).long(), self._pool.groups[command.group]
                pool.write_pages(pages, self._group.own_columns(content, pool.page_bytes))
            case commands.ProfileStart():
                self._profiler.start(command)
            case commands.ProfileStop():
                message = self._profiler.stop()
            case commands.ReadAdapter() | commands.LoadAdapter() | commands.PlaceAdapter():
                assert self._adapters is not None
                return self._adapters.obey(command, self._drop)
            case commands.Decline() | commands.MeetGroups() | commands.SetVersion():
                pass
            case commands.RecordExperts():
                assert self._weights is not None
                message = self._weights.experts.obey(command)
            case _:
                assert_never(command)
        return CommandResult(message, self._obstacle(), time.monotonic() - began, lost=lost)

    def _awake_weights(self) -> WeightStore:
        if "weights" in self._asleep:
            raise RequestError("The weights are released; resume them first (/resume_memory_occupation).")
        assert self._weights is not None
        return self._weights

    @contextlib.contextmanager
    def _moving(self, weights: WeightStore) -> Iterator[None]:
        """While weights are written, which may get other addresses."""
        if not weights.in_place:
            self._drop()
        yield
        if not weights.in_place and not self._asleep:
            self._rebuild()

    def _swap(self, command: commands.SwapWeights) -> str:
        weights = self._awake_weights()
        checkpoint = weights.live.together(lambda: weights.find(command.model_path, command.load_format))
        with self._moving(weights):
            weights.fill(checkpoint)
        if command.load_format == "dummy":
            return "The weights are random (load_format dummy)."
        return f"The weights are those of {command.model_path}."

    def _sleep(self, tags: list[MemoryTag]) -> str:
        if tags:
            self._drop()
        for tag in tags:
            self._owner_of(tag).release()
            self._asleep.add(tag)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return f"Released: {', '.join(tags)}." if tags else "Already released."

    def _wake(self, tags: list[MemoryTag]) -> tuple[str, bool]:
        lost = "weights" in tags and self._weights is not None and self._weights.patched
        for tag in tags:
            self._owner_of(tag).restore()
            self._asleep.discard(tag)
        if tags and not self._asleep:
            self._rebuild()
        again = " The weights are those of the files; send the tensors that came since then again." if lost else ""
        return f"Resumed: {', '.join(tags) or 'nothing, it was not released'}.{again}", lost

    def _owner_of(self, tag: MemoryTag) -> WeightStore | KVPool:
        if tag == "kv_cache":
            return self._pool
        assert self._weights is not None
        return self._weights

    def _obstacle(self) -> str:
        if not self._asleep:
            return ""
        tags = " and ".join(tag for tag in MEMORY_TAGS if tag in self._asleep)
        return f"The engine's memory ({tags}) is released; resume it first (/resume_memory_occupation)."


class TorchProfiler:
    """Owns the recording that is under way, if one is. Its traces open in Perfetto or chrome://tracing. All threads are
    recorded, because on a CPU the model runs on a thread of its own."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None
        self._path = Path()
        self._started = 0

    def start(self, command: commands.ProfileStart) -> None:
        known = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA, "CUDA": ProfilerActivity.CUDA}
        names = command.activities or (("CPU", "GPU") if torch.cuda.is_available() else ("CPU",))
        unknown = [name for name in names if name.upper() not in known]
        if unknown:
            raise RequestError(f"activities must be among CPU and GPU, got {unknown[0]!r}.", field="activities")
        activities = {known[name.upper()] for name in names}
        if not torch.cuda.is_available():
            activities.discard(ProfilerActivity.CUDA)  # SGLang's benchmark asks for both everywhere
        if not activities:
            raise RequestError("activities: there is no GPU to record; leave it out, or give CPU.", field="activities")
        # Where none is given, a folder of its own: names in the shared one can be guessed, and links laid there.
        folder = _folder(command.output_dir) if command.output_dir else Path(tempfile.mkdtemp(prefix="bough-profile-"))
        self._started += 1  # in the name, because several may begin in one second
        name = f"bough-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._started}.trace.json.gz"
        profile = torch.profiler.profile(
            activities=activities,
            with_stack=command.with_stack,
            record_shapes=command.record_shapes,
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        profile.start()
        self._profile, self._path = profile, folder / name

    def stop(self) -> str:
        assert self._profile is not None
        profile, self._profile = self._profile, None
        profile.stop()
        profile.export_chrome_trace(str(self._path))
        return str(self._path)


def _folder(path: str) -> Path:
    try:
        folder = Path(path).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, RuntimeError) as error:  # a NUL, a lone surrogate, a user that is not there
        raise RequestError(f"output_dir is no path: {str(error).rstrip('.')}.", field="output_dir") from None
    return folder
