"""What one worker has cached, exactly, from the events that it publishes.

Prompts are matched by token ids; block hashes serve removals. Consecutive blocks of one event form a `Run`, and whole
runs are compared as bytes, so a lookup takes a few steps however long the prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from bough.memory.tree.events import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from bough.memory.tree.node import TOKEN_BYTES, common_prefix


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes for comparison. Raises an `OverflowError` for what is no token id."""
    return array("i", token_ids).tobytes()


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive blocks. `children`: by the number of its blocks before them, then by their first block."""

    tokens: bytes
    hashes: tuple[int, ...]
    parent: Run | None
    offset: int  # how many of the parent's blocks come before this run
    children: dict[int, dict[bytes, Run]] = field(default_factory=dict)


class BlockIndex:
    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._root = Run(b"", (), None, 0)
        self._runs: dict[int, Run] = {}  # by the hash of each of their blocks
        self._block_bytes = TOKEN_BYTES

    def apply(self, event: KVEvent) -> None:
        """Leaves out blocks of adapters, namespaces and slower tiers: routing by tokens alone would not find them."""
        if isinstance(event, BlockStored):
            if event.namespace == "" and event.lora_id is None and event.medium in (None, DEVICE):
                self._store(event)
        elif isinstance(event, BlockRemoved):
            if event.medium in (None, DEVICE):
                self._remove(event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            self._clear()

    def _store(self, event: BlockStored) -> None:
        self._block_bytes = event.block_size * TOKEN_BYTES
        try:
            tokens = pack(event.token_ids)
        except OverflowError:  # placeholders, such as hashes of pictures: no prompt has them
            return
        if len(tokens) != len(event.block_hashes) * self._block_bytes:
            return  # a block that is not full is no prefix that others could share
        known = next((i for i, block in enumerate(event.block_hashes) if block not in self._runs), None)
        if known is None:
            return
        above = event.block_hashes[known - 1] if known else event.parent_block_hash
        parent, offset = self._root, 0
        if above is not None:
            if above not in self._runs:  # the beginning was missed, so no prompt can lead here
                return
            parent = self._runs[above]
            offset = parent.hashes.index(above) + 1
        run = Run(tokens[known * self._block_bytes :], event.block_hashes[known:], parent, offset)
        parent.children.setdefault(offset, {})[run.tokens[: self._block_bytes]] = run
        self._runs.update(dict.fromkeys(run.hashes, run))

    def _remove(self, hashes: Sequence[int]) -> None:
        lost: dict[Run, set[int]] = {}
        for block in hashes:
            if block in self._runs:
                lost.setdefault(self._runs[block], set()).add(block)
        for run, blocks in lost.items():
            self._cut(run, next((i for i, block in enumerate(run.hashes) if block in blocks), len(run.hashes)))

    def _cut(self, run: Run, keep: int) -> None:
        """Keeps the first `keep` blocks of a run. What follows them becomes unreachable."""
        if keep == 0 and run.hashes and run.parent is not None:
            siblings = run.parent.children[run.offset]
            del siblings[run.tokens[: self._block_bytes]]
            if not siblings:
                del run.parent.children[run.offset]
        falling = [(run, keep)]
        while falling:
            run, keep = falling.pop()
            for block in run.hashes[keep:]:
                del self._runs[block]
            for offset in [offset for offset in run.children if offset > keep]:
                falling.extend((child, 0) for child in run.children.pop(offset).values())
            run.tokens, run.hashes = run.tokens[: keep * self._block_bytes], run.hashes[:keep]

    def match(self, prompt: bytes) -> int:
        """How many leading tokens of a packed prompt the worker holds."""
        size = self._block_bytes
        run, blocks, at = self._root, 0, 0
        while True:
            run_next = run.children.get(blocks, {}).get(prompt[at : at + size])
            if run_next is None:
                return at // TOKEN_BYTES
            run = run_next
            blocks = common_prefix(run.tokens, prompt, at) // size
            at += blocks * size
