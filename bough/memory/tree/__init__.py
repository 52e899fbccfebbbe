"""Page accounting on the host, without torch: which pages are free, and which prefixes the others hold.

`PagePool` owns the free page numbers and `RadixTree` owns the pages of cached prefixes; `GroupPages` owns those of
layers that need less than a whole prefix. `audit_pages` proves that no page is lost or owned twice. The tensors behind
the numbers belong to `bough.memory.pools`.
"""
