"""What is particular to latent attention, in plain torch: the store of latents, and the ways to and from heads.

`weight` is of every head the matrix that makes its keys of a latent, and below it the one that makes its values.
"""

import torch

from bough.core.model_config import LatentConfig
from bough.kernels.norm_rope_store.reference import angles_of, apply_rope, keep
from bough.kernels.rms_norm.reference import rms_norm


def latent_store_(
    q: torch.Tensor,  # [tokens, heads, nope_dim + rope_dim], the last two dimensions contiguous
    latents: torch.Tensor,  # [tokens, rank + rope_dim], the last dimension contiguous
    weight: torch.Tensor,  # [rank]
    eps: float,
    cos: torch.Tensor,  # [context, rope_dim / 2] float32
    sin: torch.Tensor,  # [context, rope_dim / 2] float32
    positions: torch.Tensor,  # [tokens] int64
    slots: torch.Tensor,  # [tokens] int64
    cache: torch.Tensor,  # [slots, 1, rank + rope_dim]
    scale: float = 1.0,  # what readers multiply stored numbers with, where the cache has 8 bits
) -> None:
    """Normalises the latents, rotates the end of each of them and of each query head, all in place, and stores the
    latents."""
    rank, rope_dim = len(weight), 2 * cos.shape[1]
    latents[:, :rank] = rms_norm(latents[:, :rank], weight, eps)[0]
    angles = angles_of(cos, sin, positions)
    for part in (q[..., -rope_dim:], latents[:, None, rank:]):
        part.copy_(apply_rope(part, *angles))
    keep(latents[:, None], cache, slots, scale)


def absorb(
    q: torch.Tensor,  # [tokens, heads, nope_dim + rope_dim]
    weight: torch.Tensor,  # [heads, nope_dim + value_dim, rank]
    nope_dim: int,
) -> torch.Tensor:
    """Queries that attend to latents. [tokens, heads, rank + rope_dim]"""
    mapped = torch.einsum("thn,hnr->thr", q[..., :nope_dim], weight[:, :nope_dim])
    return torch.cat((mapped, q[..., nope_dim:]), dim=-1)


def lift(
    attended: torch.Tensor,  # [tokens, heads, rank]
    weight: torch.Tensor,  # [heads, nope_dim + value_dim, rank]
    nope_dim: int,
) -> torch.Tensor:
    """Of sums of latents, the sums of the values that are made of these. [tokens, heads, value_dim]"""
    return torch.einsum("thr,hvr->thv", attended, weight[:, nope_dim:])


def expand(
    latents: torch.Tensor,  # [tokens, rank + rope_dim]
    made: torch.Tensor,  # [tokens, heads, nope_dim + value_dim], products of these
    latent: LatentConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [tokens, heads, nope_dim + rope_dim] and values [tokens, heads, value_dim]."""
    shared = latents[:, None, latent.rank :].expand(-1, made.shape[1], -1)
    return torch.cat((made[..., : latent.nope_dim], shared), dim=-1), made[..., latent.nope_dim :]
