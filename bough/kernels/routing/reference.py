"""Routing in plain torch."""

import torch

from bough.core.model_config import MoEConfig

WORD = 0xFFFFFFFF


def route(logits: torch.Tensor, moe: MoEConfig, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a router's logits [tokens, experts]: the experts of each token [tokens, per_token + appended] int32, the best
    first, and their weights in float32. `bias` [experts] counts when choosing only."""
    ids, weights = _choose(logits, moe, bias)
    if not moe.appended:
        return ids, weights
    behind = torch.arange(moe.experts, moe.experts + moe.appended, dtype=ids.dtype, device=ids.device)
    whole = torch.ones(len(ids), moe.appended, dtype=weights.dtype, device=ids.device)
    return torch.cat((ids, behind.expand(len(ids), -1)), 1), torch.cat((weights, whole), 1)


def _choose(logits: torch.Tensor, moe: MoEConfig, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if moe.simulate == "uniform":
        return simulated(logits, moe)
    if moe.scores == "sparsemixer":
        return sparsemixer(logits.float(), moe)
    scores = logits.float().softmax(-1) if moe.scores == "softmax" else logits.float().sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if moe.groups > 1:
        best = (
            choice.view(-1, moe.groups, moe.experts // moe.groups)
            .topk(2 if moe.group_score == "best_two" else 1, dim=2)
            .values
        )
        kept = torch.zeros_like(best[:, :, 0]).scatter_(1, best.sum(2).topk(moe.top_groups, dim=1).indices, 1.0)
        left_out = kept.repeat_interleave(moe.experts // moe.groups, dim=1) == 0
        choice = choice.masked_fill(left_out, float("-inf"))
    ids = choice.topk(moe.per_token, dim=1).indices
    weights = scores.gather(1, ids)
    if moe.renormalise:
        weights = weights / weights.sum(1, keepdim=True)
    return ids.int(), weights * moe.scale


def sparsemixer(logits: torch.Tensor, moe: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts one after the other, each weighed among those near it that are left."""
    left, ids, weights = logits, [], []
    for _ in range(moe.per_token):
        best, expert = left.max(1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * moe.jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(1).gather(1, expert))
        ids.append(expert)
        left = left.scatter(1, expert, float("-inf"))
    return torch.cat(ids, 1).int(), torch.cat(weights, 1) * moe.scale


def simulated(logits: torch.Tensor, moe: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts drawn evenly, by a hash of the token's place in the step: those that random weights choose are far from
    even. A token's experts are equally far apart, so that no two are the same."""
    token = torch.arange(logits.shape[0], device=logits.device)[:, None]
    slot = torch.arange(moe.per_token, device=logits.device)[None, :]
    mixed = (token + 1) * 0x9E3779B1 & WORD
    mixed = ((mixed ^ mixed >> 15) * 0x85EBCA6B) & WORD
    mixed = mixed ^ mixed >> 13
    stride = 1 + (mixed >> 16) % (moe.experts // moe.per_token)
    ids = ((mixed & 0xFFFF) % moe.experts + slot * stride) % moe.experts
    return ids.int(), torch.full(ids.shape, moe.scale / moe.per_token, dtype=torch.float32, device=logits.device)
