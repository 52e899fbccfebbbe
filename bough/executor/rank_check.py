"""`--check-ranks`: in every step all ranks compare what they must have alike."""

import zlib
from collections.abc import Sequence

import torch

from bough.core.errors import EngineDeadError
from bough.core.plan import BatchPlan
from bough.distributed.group import RankGroup
from bough.executor.layout import RowMirror


class RankCheck:
    """A difference ends the engine: every rank of a stage finds it, and says whose it is; a stage that differs from the
    one before says so itself, so that stages still wait for none behind them. The host waits for each comparison."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self._group, self._device, self._step = group, device, 0

    def rows(self, plan: BatchPlan, mirror: RowMirror) -> None:
        """Compares the plan, and what its rows hold once it was applied."""
        self._step = plan.step
        pages, counts, lengths = mirror.held_by(plan.rows)
        arrays = {
            "rows": (plan.rows, plan.query_lens, plan.sample),
            "given tokens": (plan.given, plan.tokens),
            "lengths of rows": (lengths,),
            "page tables": (counts, pages),
        }
        digests = [zlib.crc32(b"".join(part.tobytes() for part in parts)) for parts in arrays.values()]
        names = [f"the digest of the {what}" for what in arrays]
        found, place = torch.tensor(digests, dtype=torch.int64, device=self._device), self._group.topology
        self._compare(names, found)
        if not place.is_first:
            before = self._group.take_over(torch.empty_like(found))
            self._find(names, found.tolist(), place.rank, before.tolist(), place.rank - place.tp_size)
        if not place.is_last:
            self._group.pass_on(found)

    def tokens(self, sampled: torch.Tensor) -> torch.Tensor:
        """Compares what each rank has sampled; returns what the first has."""
        self._compare([f"sampled token {place}" for place in range(len(sampled))], sampled)
        return self._group.from_first(sampled)

    def _compare(self, names: Sequence[str], values: torch.Tensor) -> None:
        place = self._group.topology
        if place.tp_size > 1:
            first, *others = self._group.all_gather(values[None]).view(-1, len(values)).tolist()
            for rank, other in enumerate(others, start=1):
                self._find(names, other, place.rank - place.tp_rank + rank, first, place.rank - place.tp_rank)

    def _find(self, names: Sequence[str], values: list[int], rank: int, others: list[int], other: int) -> None:
        for name, found, expected in zip(names, values, others, strict=True):
            if found != expected:
                text = f"Rank {rank} differs from rank {other} in step {self._step}"
                raise EngineDeadError(f"{text}: {name} is {found}, not {expected} (--check-ranks).")


def make_check(wanted: bool, group: RankGroup, device: torch.device) -> RankCheck | None:
    return RankCheck(group, device) if wanted and group.topology.tp_size * group.topology.pp_size > 1 else None
