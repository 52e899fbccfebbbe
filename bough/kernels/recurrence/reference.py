"""The recurrences of gated delta nets, of Kimi's delta attention and of Mamba 2 in plain torch, the short convolution
before them, and which tokens of a step belong to which row.

A head's matrix decays, and then learns that its key means its value: by the delta rule, which first looks up what the
key means so far and adds only a share `beta` of what is missing; or, without `beta`, by adding the whole value. What
the query finds is the result. Prompts are computed in chunks, whose tokens know of each other through products.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bough.core.plan import IntArray


class StateRows(NamedTuple):
    """Rows of a step, whose tokens stand back to back."""

    table: torch.Tensor  # [max_rows, any] int32, of each row the page of its state comes first
    rows: torch.Tensor  # [batch] int32
    query_starts: IntArray  # [batch + 1] on the host, for torch
    starts: torch.Tensor | None = None  # the same on the device, for kernels; None: each row has one token
    drafted: int = 0  # of the first so many rows drafts are among the tokens: their states are read, and stay

    @property
    def pages(self) -> torch.Tensor:
        """[batch] int64"""
        return self.table[self.rows.long(), 0].long()

    def runs(self) -> Iterator[tuple[int, int, int, bool]]:
        """Of each row its page, where its tokens begin and end, and whether its state stays."""
        runs = zip(self.pages.tolist(), pairwise(self.query_starts.tolist()), strict=True)
        for place, (page, (begin, end)) in enumerate(runs):
            yield page, begin, end, place < self.drafted


CHUNK = 64
CHANNEL_CHUNK = 16  # where every channel of a key decays by itself, products of a chunk are computed one by one
NORM_EPS = 1e-6


def recurrence_(
    q: torch.Tensor,  # [tokens, key_heads, key_dim]
    k: torch.Tensor,  # [tokens, key_heads, key_dim]
    v: torch.Tensor,  # [tokens, heads, value_dim]
    decay: torch.Tensor,  # [tokens, heads] or [tokens, heads, key_dim], float32, logarithms
    beta: torch.Tensor | None,  # [tokens, heads]; with it, queries and keys are made unit vectors, and scaled as such
    matrices: torch.Tensor,  # [pages, heads, key_dim, value_dim] float32
    rows: StateRows,
) -> torch.Tensor:
    """[tokens, heads, value_dim], in the type of v; and the matrices of the rows go on."""
    shared, dtype = v.shape[1] // q.shape[1], v.dtype
    q, k, v = (x.float() for x in (q, k, v))
    if beta is not None:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
        q, beta = q * q.shape[-1] ** -0.5, beta.float()[..., None]
    q, k = (x.repeat_interleave(shared, dim=1) if shared > 1 else x for x in (q, k))
    decay = decay if decay.ndim == 3 else decay[..., None]
    # Heads come first, [heads, tokens, …], side by side in memory.
    q, k, v, decay = (x.transpose(0, 1).contiguous() for x in (q, k, v, decay))
    beta = None if beta is None else beta.transpose(0, 1).contiguous()
    out, size = torch.empty_like(v), CHUNK if decay.shape[-1] == 1 else CHANNEL_CHUNK
    for page, begin, end, stays in rows.runs():
        state = matrices[page].clone() if stays else matrices[page]
        for first in range(begin, end, size):
            some = slice(first, min(first + size, end))
            share = None if beta is None else beta[:, some]
            advance = _step if end == begin + 1 else _chunk
            out[:, some] = advance(q[:, some], k[:, some], v[:, some], decay[:, some], share, state)
    return out.transpose(0, 1).to(dtype)


def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token of a row."""
    state.mul_(decay.exp().transpose(1, 2))
    if beta is not None:
        v = (v - k @ state) * beta
    state.baddbmm_(k.transpose(1, 2), v)
    return q @ state


def _chunk(
    q: torch.Tensor,  # [heads, tokens, key_dim]
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,  # [heads, tokens, 1 or key_dim]
    beta: torch.Tensor | None,  # [heads, tokens, 1]
    state: torch.Tensor,  # [heads, key_dim, value_dim]
) -> torch.Tensor:
    """Some tokens of one row."""
    since = decay.cumsum(1)  # the chunk began
    if beta is not None:
        # What a token adds depends on what those before it have added: a triangular system.
        system = _products(k * beta, k, since)
        missing = beta * (v - (k * since.exp()) @ state)
        v = torch.linalg.solve_triangular(system, missing, upper=False, unitriangular=True).contiguous()
    found = (q * since.exp()) @ state + _products(q, k, since) @ v
    left = since[:, -1:] - since
    state.mul_(since[:, -1, :, None].exp()).baddbmm_((k * left.exp()).transpose(1, 2), v)
    return found


def _products(a: torch.Tensor, b: torch.Tensor, since: torch.Tensor) -> torch.Tensor:
    """Of each token i of a with each j of b up to it, decayed from j to i. [heads, tokens, tokens]"""
    later = torch.ones(a.shape[1], a.shape[1], dtype=torch.bool, device=a.device).triu(1)
    between = (since[:, :, None] - since[:, None]).masked_fill(later[..., None], float("-inf")).exp()
    if since.shape[-1] == 1:
        # A copy, some of torch's libraries multiply with a transposed matrix ten times slower.
        return (a @ b.transpose(1, 2).contiguous()) * between[..., 0]
    return torch.einsum("hid,hjd,hijd->hij", a, b, between)


def causal_conv_(
    x: torch.Tensor,  # [tokens, channels]
    weight: torch.Tensor,  # [channels, width], of each channel the oldest token's first
    bias: torch.Tensor | None,  # [channels]
    tails: torch.Tensor,  # [pages, width - 1, channels] float32, the last inputs of each sequence
    rows: StateRows,
    silu: bool = True,
) -> torch.Tensor:
    """Of each channel the weighted sum of a token and those before it, in float32; and the tails of the rows go on."""
    taps, out = weight.float().t(), torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for page, begin, end, stays in rows.runs():
        seen = torch.cat((tails[page], x[begin:end].float()))
        for tap, scale in enumerate(taps):
            out[begin:end].addcmul_(seen[tap : tap + end - begin], scale)
        if not stays:
            tails[page] = seen[end - begin :]
    if bias is not None:
        out = out + bias
    return (F.silu(out, inplace=True) if silu else out).to(x.dtype)
