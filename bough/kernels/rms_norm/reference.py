"""RMS norm in plain torch.

Written out in small operators: on a CPU this costs about as much as `torch.nn.functional.rms_norm` for one token and
less for several, because the norm is a single reduction and what follows works in place on fresh memory.
"""

import torch


def rms_norm(
    x: torch.Tensor,  # [..., size]
    weight: torch.Tensor,  # [size]
    eps: float,
    residual: torch.Tensor | None = None,  # like x
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds `residual` to `x`, and returns that sum normalised and the sum itself, which is the next residual.

    `plus_one` is for checkpoints that store the weight minus one: adding it in a 16-bit type would round it away.
    Statistics and scaling are in float32 at least; the result is rounded to the type of `x` once, at the end.
    """
    if residual is not None:
        x = x + residual
    wide = x if x.dtype.itemsize >= 4 else x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    floor = torch.full((), eps, dtype=wide.dtype, device=wide.device)
    inverse = torch.addcmul(floor, length, length, value=1.0 / wide.shape[-1]).rsqrt_()
    normed = wide * inverse
    if plus_one:
        normed.addcmul_(normed, weight)
    else:
        normed.mul_(weight)
    return (normed if wide is x else normed.to(x.dtype)), x
