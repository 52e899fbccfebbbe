"""Page accounting on the host, without torch: which pages are free, and which prefixes the others hold.

`PagePool` owns the free page numbers and `RadixTree` owns the pages of cached prefixes; `GroupPages` owns those of
layers that need less than a whole prefix. `audit_pages` proves that no page is lost or owned twice. The tensors behind
the numbers belong to `bough.memory.pools`.
"""

from bough.memory.tree.audit import Audit, audit_pages
from bough.memory.tree.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from bough.memory.tree.eviction import POLICIES
from bough.memory.tree.groups import GroupPages
from bough.memory.tree.node import Namespace, Node
from bough.memory.tree.pool import PageOwnershipError, PagePool, PagesExhausted
from bough.memory.tree.tree import Inserted, Match, RadixTree

__all__ = [
    "POLICIES",
    "AllBlocksCleared",
    "Audit",
    "BlockRemoved",
    "BlockStored",
    "GroupPages",
    "Inserted",
    "KVEvent",
    "Match",
    "Namespace",
    "Node",
    "PageOwnershipError",
    "PagePool",
    "PagesExhausted",
    "RadixTree",
    "audit_pages",
]
