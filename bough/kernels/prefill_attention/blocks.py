"""The grid of a ragged prefill: which queries of which row each program takes. Decided on the host, where the number of
new tokens of each row is always known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


def query_blocks(query_lens: IntArray, block_m: int, context_lens: IntArray | None = None) -> IntArray:
    """[blocks, 2]: a row's place in the batch and the block's first query in that row; `block_m` queries each.

    The blocks with the most keys to read come first, so that the last to run are short. Context lengths, which may be
    bounds, serve that order only.
    """
    counts = -(-query_lens // block_m)
    place = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    first = (np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)) * block_m
    keys = np.minimum(first + block_m, query_lens[place])
    if context_lens is not None:
        keys = keys + context_lens[place]
    order = np.argsort(-keys, kind="stable")
    return np.stack((place, first), axis=1).astype(np.int32)[order]
