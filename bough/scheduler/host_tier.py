"""The prefix cache with a second tier below the device: pages whose content is copied to memory of the host and back.

The host has a radix tree and page accounts of its own, of the same form as the device's, because both name content by
the tokens before it. So a prefix may be in either tier or in both, and each evicts by itself. What a plan computes is
copied out when its request has ended, of a few requests at a time and rather while nothing runs: copies must not hold
up the next plans, but nothing leaves the device before it has been copied. What a request finds on the host alone is
copied into pages of the device before the plan that reads them is launched. Order is the synchronisation here too:
nothing waits for a copy, except an eviction of pages that are still being copied out.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bough.core.control import CopyPagesIn, CopyPagesOut, Ticket
from bough.core.plan import Executor, HostMemory, IntArray, Limits
from bough.core.settings import MemorySettings
from bough.memory.tree.audit import Audit
from bough.memory.tree.events import HOST, KVEvent
from bough.memory.tree.node import Node, key_of
from bough.memory.tree.tree import NO_PAGES, Match
from bough.scheduler.ports import LowerTier
from bough.scheduler.prefix_cache import PrefixCache

log = logging.getLogger(__name__)

MEMORY = 0.7  # of the rate that was known before, when a further copy is slower
AT_ONCE = 16  # requests whose pages are copied out beside a plan: each takes the host a tenth of a millisecond
MOST_DUE, MOST_SHARE = 64, 0.25  # requests that wait for that while plans follow each other, and the cache they fill
TRY_AGAIN = 50  # copies that did not pay before one is made all the same: the rate may have been learnt wrong


Noted = tuple[IntArray, str, int]  # tokens, their namespace, and when the device's tree had them used; 0: not known


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy under way."""

    ticket: Ticket
    command: CopyPagesOut | CopyPagesIn
    read: IntArray  # pages of full attention that must stay as they are until it is done
    keys: Sequence[tuple[IntArray, str]] = ()  # tokens that are on the host then, and their namespaces


class CopyRate:
    """How fast a tier's bytes come, as far as it is measured, and whether it pays to wait for them."""

    bytes_per_s: float | None = None
    _unpaid = 0  # copies in a row that would not have paid

    def learn(self, nbytes: int, seconds: float | None) -> None:
        if seconds:
            seen = nbytes / seconds
            self.bytes_per_s = max(seen, MEMORY * (self.bytes_per_s or seen) + (1.0 - MEMORY) * seen)

    def seconds(self, nbytes: int) -> float:
        return nbytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def pays(self, nbytes: int, tokens: int, tokens_per_s: float | None, more_s: float = 0.0) -> bool:
        """Whether a copy, and what takes so long behind it, takes no longer than to compute so many tokens, as far as
        both are measured."""
        seconds = self.seconds(nbytes)
        if not seconds or not tokens_per_s or seconds + more_s <= tokens / tokens_per_s:
            self._unpaid = 0
            return True
        self._unpaid = (self._unpaid + 1) % TRY_AGAIN
        return self._unpaid == 0


class TieredCache(PrefixCache):
    """Owns the host's tier and the copies under way."""

    tiered = True

    def __init__(
        self,
        limits: Limits,
        memory: MemorySettings,
        on_event: Callable[[KVEvent], None] | None,
        executor: Executor,
        buffers: HostMemory,
    ) -> None:
        super().__init__(limits, memory, on_event)
        pages = tuple(len(buffer) - 1 for buffer in buffers)
        self.host = PrefixCache(
            replace(limits, pages=pages), replace(memory, radix_eviction_policy="lru"), on_event, HOST
        )
        self._executor, self._buffers, self.on_event = executor, buffers, on_event
        self.below: LowerTier | None = None
        self._page_bytes = [limits.copied_bytes(group) for group in range(len(limits.groups))]
        self.use_policy(memory.hicache_write_policy)
        self._noted: list[Noted] = []  # what can be copied out when the plan in the making is launched
        self._due: list[Noted] = []  # what can be copied out
        self._reading = np.zeros(1 + limits.pages[0], dtype=np.int32)  # how many copies under way read each page
        self._most_due = MOST_SHARE * limits.pages[0] * limits.page_size
        self.under_way: deque[Transfer] = deque()  # in the order in which they end
        self.rate = CopyRate()  # of copies in
        self._loaded_tokens = self._bytes_in = self._bytes_out = 0

    def use_policy(self, policy: str) -> None:
        if policy == "write_back" and self.groups:
            log.warning("write_back: windows and states leave the device one by one, so this model writes through")
            policy = "write_through"
        self._policy = policy

    # What requests do -------------------------------------------------------------------------------------------------

    def note(self, tokens: IntArray, namespace: str, ended: Node | None = None) -> None:
        # What a running request reads does not leave the device, but pages of further groups do, and other engines
        # may want to find a prompt in a store at once.
        early = bool(self.groups) or self.below is not None
        if self._policy == "write_through" and (ended is None) == early:
            used = 0 if ended is None else ended.last_used
            (self._noted if ended is None else self._due).append((tokens.copy(), namespace, used))

    def launched(self) -> None:
        self._due, self._noted = self._due + self._noted, []
        if self.groups or self.below is not None:
            self._write_due(len(self._due))  # before the next plan lets go of pages

    def copy_out(self, resting: bool) -> None:
        if resting or len(self._due) > MOST_DUE or sum(len(tokens) for tokens, *_ in self._due) > self._most_due:
            self._write_due(max(AT_ONCE, len(self._due) // AT_ONCE))  # more where more end with each plan
        while self.under_way and self.under_way[0].ticket.ready():
            self._finish(self.under_way.popleft())
        self.behind = bool(self._due or self.under_way)

    def fetch(self, match: Match, tokens: IntArray, namespace: str, tokens_per_s: float | None) -> Match:
        if self._policy == "write_through_selective" and match.length:
            self._noted.append((tokens[: match.length].copy(), namespace, 0))
        self.load_s = 0.0
        length = self.host.tree.match_length(tokens, namespace)
        if length <= match.length:
            return match
        found = self.host.match_and_lock(tokens, namespace)
        if self._load(found, tokens[:length], namespace, length - match.length, tokens_per_s):
            before = match.length
            self.unlock(match)
            match = self.match_and_lock(tokens, namespace)
            self._loaded_tokens += match.length - before
        self.host.unlock(found)
        return match

    def flush(self) -> None:
        self._settle()
        self.host.flush()
        super().flush()

    def forget(self, tokens: IntArray, namespace: str) -> None:
        self._settle()
        self.host.forget(tokens, namespace)
        if self.below is not None:
            self.below.forget(tokens, namespace)
        super().forget(tokens, namespace)

    def _settle(self) -> None:
        self._noted.clear()
        self._due.clear()
        self.behind = False
        self.under_way = deque(replace(transfer, keys=()) for transfer in self.under_way)  # offers nothing any more
        self._finish_all()

    def adopt(self, tokens: IntArray, namespace: str, pages: Sequence[IntArray], content: HostMemory) -> None:
        """Takes over what the tier below has brought up: of each group the page of `content`, counted from 1, that
        holds each page of these tokens; 0 where there is none, or where the host has it."""
        self._finish_all()  # a copy under way may still use a page that is free again
        for group, rows, slots in self.host.place(tokens, namespace, pages):
            self._buffers[group][slots] = content[group][rows - 1]

    # What others want to know -----------------------------------------------------------------------------------------

    @property
    def figures(self) -> dict[str, float]:
        pool, size = self.host.pool, self.page_size
        return {
            **super().figures,
            "hicache_host_used_tokens": (pool.total - pool.free) * size,
            "hicache_host_total_tokens": pool.total * size,
            "load_back_tokens_total": self._loaded_tokens,
            "hicache_bytes_in_total": self._bytes_in,
            "hicache_bytes_out_total": self._bytes_out,
            "hicache_bytes_per_s": self.rate.bytes_per_s or 0.0,
            "hicache_evicted_tokens_total": self.host.evicted * size,
            **({} if self.below is None else self.below.figures),
        }

    def audit(self, held: Mapping[str, IntArray], group_held: Sequence[Mapping[str, IntArray]]) -> Audit:
        audit, host = super().audit(held, group_held), self.host.audit({}, [{} for _ in self.groups])
        audit.problems.extend(f"host: {problem}" for problem in host.problems)
        return audit

    # Copies out -------------------------------------------------------------------------------------------------------

    def _write_due(self, most: int) -> None:
        now, self._due = self._due[:most], self._due[most:]
        self._write([each[:2] for each in now], beside=True)

    def _write(self, noted: Sequence[tuple[IntArray, str]], *, beside: bool) -> None:
        """Copies to the host what the device has of these tokens and the host has not: what many requests have
        computed in one step at once, since each copy takes some of the host's time."""
        placed: dict[int, list[tuple[IntArray, IntArray]]] = {}
        for tokens, namespace in noted:
            for group, *copy in self.host.place(tokens, namespace, self.tree.pages_of(tokens, namespace)):
                if self._page_bytes[group]:
                    placed.setdefault(group, []).append((copy[0], copy[1]))
        for left, (group, copies) in zip(range(len(placed) - 1, -1, -1), placed.items(), strict=True):
            pages, slots = (np.concatenate(each) for each in zip(*copies, strict=True))
            # Neighbours cross the bus together. Where room was made at the cost of an earlier one, the last counts.
            slots, last = np.unique(slots[::-1], return_index=True)
            pages = pages[::-1][last]
            # Pages of further groups leave the tree without notice, so later plans wait for those.
            apart = beside and not group
            command = CopyPagesOut(pages, self._buffers[group], group, slots, apart)
            read = pages if apart else NO_PAGES
            self._reading[read] += 1
            self.under_way.append(Transfer(self._executor.control(command), command, read, () if left else noted))

    def _evict(self, count: int) -> IntArray:
        pages = self.tree.evict(count, self._before_eviction)
        while self._reading[pages].any():
            self._finish(self.under_way.popleft())
        return pages

    def _before_eviction(self, leaf: Node) -> None:
        """Copies out what this leaf may belong to. A leaf that was last used before all that is due is none of that."""
        if self._policy == "write_back":
            self._write([key_of(leaf)], beside=False)
        elif self._due and leaf.last_used >= min(used for *_, used in self._due):
            self._write_due(len(self._due))

    # Copies in --------------------------------------------------------------------------------------------------------

    def _load(self, found: Match, tokens: IntArray, namespace: str, more: int, tokens_per_s: float | None) -> bool:
        """Copies to the device what it lacks of `found`, which holds `tokens`: `more` than it can go on behind now.
        False: there is no room, or it takes longer than to compute them."""
        offered = (found.pages, *found.group_pages)
        _, places = self.lacking(tokens, namespace, offered)
        nbytes = sum(len(at) * each for at, each in zip(places, self._page_bytes, strict=True))
        if not self.rate.pays(nbytes, more, tokens_per_s):
            return False
        copies = self.place(tokens, namespace, offered, whole=True)
        for group, slots, pages in copies:
            if self._page_bytes[group]:
                command = CopyPagesIn(pages, self._buffers[group], group, slots)
                self.under_way.append(Transfer(self._executor.control(command), command, NO_PAGES))
        self.load_s = self.rate.seconds(nbytes) if copies else 0.0
        return bool(copies)

    # Copies under way -------------------------------------------------------------------------------------------------

    def _finish(self, transfer: Transfer) -> None:
        seconds, command = transfer.ticket.wait().seconds, transfer.command
        self._reading[transfer.read] -= 1
        nbytes = len(command.pages) * self._page_bytes[command.group]
        if isinstance(command, CopyPagesIn):
            self._bytes_in += nbytes
            self.rate.learn(nbytes, seconds)
            return
        self._bytes_out += nbytes
        if (below := self.below) is None:
            return
        for key in transfer.keys:
            pages = self.host.tree.pages_of(*key)
            for later in (each.command for each in self.under_way):  # they may fill pages that were evicted meanwhile
                if isinstance(later, CopyPagesOut) and later.slots is not None:
                    pages[later.group][np.isin(pages[later.group], later.slots)] = 0
            below.offer(*key, pages, self._buffers)

    def _finish_all(self) -> None:
        while self.under_way:
            self._finish(self.under_way.popleft())
