"""Proves that every page has exactly one owner: the free pool, the tree, or one request.

Each owner audits its own books with `check`; this adds what only all of them together can show. It is meant for an idle
engine and for tests. It reports and changes nothing: what to do about a leak is the caller's choice.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bough.core.plan import IntArray
from bough.memory.tree.pool import PagePool
from bough.memory.tree.tree import RadixTree

MAX_LINES = 20


class Audit(NamedTuple):
    """What an audit found. `leaked` pages have no owner at all, so `PagePool.repair` may take them back."""

    problems: list[str]
    leaked: IntArray


def audit_pages(pool: PagePool, tree: RadixTree, held: Mapping[str, IntArray]) -> Audit:
    """Compares the books of all owners; `held` has the pages that each request owns, not those it reads in the tree."""
    problems = pool.check() + tree.check()
    books = {"the free pool": pool.free_pages(), "the tree": tree.pages_in_use(), **held}
    owners = np.zeros(pool.total + 1, dtype=np.int64)
    for owner, pages in books.items():
        ours = (pages >= 1) & (pages <= pool.total)
        problems += [f"{owner} owns page {page}, which does not exist" for page in pages[~ours].tolist()]
        owners += np.bincount(pages[ours], minlength=pool.total + 1)
    leaked = np.flatnonzero(owners[1:] == 0).astype(np.int32) + 1
    contested = np.flatnonzero(owners > 1)
    if len(leaked) or len(contested):
        in_requests = sum(len(pages) for pages in held.values())
        problems.append(
            f"{pool.free} free + {tree.evictable_pages} evictable + {tree.protected_pages} protected"
            f" + {in_requests} held = {pool.free + tree.total_pages + in_requests}, and there are {pool.total} pages"
        )
    if len(leaked):
        shown = " ".join(map(str, leaked[:MAX_LINES].tolist()))
        problems.append(f"{len(leaked)} pages belong to nobody: {shown}{' ...' if len(leaked) > MAX_LINES else ''}")
    for page in contested[:MAX_LINES].tolist():
        names = [owner for owner, pages in books.items() for _ in range(int((pages == page).sum()))]
        problems.append(f"page {page} belongs to {' and to '.join(names)}")
    if len(contested) > MAX_LINES:
        problems.append(f"... and {len(contested) - MAX_LINES} more pages with several owners")
    return Audit(problems, leaked)
