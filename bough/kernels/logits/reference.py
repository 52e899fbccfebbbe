"""Bias, penalties, masks and normalisers of logits in plain torch, line by line.

CPUs use it as it is: a line fits their caches, a batch does not. Bytes of a mask are looked up as eight numbers to add,
0 or -inf, which is far cheaper there than filling by a mask of booleans.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class PenaltyLines:
    """Some rows of a batch, each once. [m] int64 each"""

    places: Tensor  # in the batch
    rows: Tensor  # their numbers
    count_slots: Tensor  # NO_SLOT: no penalties
    prompt_slots: Tensor  # NO_SLOT: no repetition penalty; else there is a count slot too
    bias_slots: Tensor  # NO_SLOT: no bias


@dataclass(frozen=True, slots=True)
class PenaltyStore:
    """What all rows keep."""

    repetition: Tensor  # [rows] float32
    frequency: Tensor  # [rows] float32
    presence: Tensor  # [rows] float32
    counts: Tensor  # [slots, V] float32: how often a token stands in the output
    prompts: Tensor  # [slots, V] bool: whether it stands in the prompt
    bias: Tensor  # [slots, V] float32


def penalise(logits: Tensor, lines: PenaltyLines, store: PenaltyStore) -> Tensor:
    """The lines of `logits` [n, V] as their rows want them, in float32: 16 bits round small penalties away. [m, V]

    In this order: the bias is added; a repetition penalty moves every token of prompt and output towards less likely,
    whichever sign its logit has; the others, OpenAI's, are taken off for each time that an output token stood, and once
    for having stood at all. A line without slots is only widened.
    """
    result = torch.empty((len(lines.places), logits.shape[1]), dtype=torch.float32, device=logits.device)
    fields = (lines.places, lines.rows, lines.count_slots, lines.prompt_slots, lines.bias_slots)
    for line, (place, row, counted, prompted, biased) in zip(result, torch.stack(fields, dim=1).tolist(), strict=True):
        line.copy_(logits[place])
        if biased >= 0:
            line.add_(store.bias[biased])
        if prompted >= 0:
            seen = (store.counts[counted] > 0).logical_or_(store.prompts[prompted])
            penalty = store.repetition[row]
            line.copy_(torch.where(seen, torch.where(line > 0, line / penalty, line * penalty), line))
        if counted >= 0:
            counts = store.counts[counted]
            line.addcmul_(counts, store.frequency[row], value=-1)
            line.addcmul_(counts.clamp(max=1), store.presence[row], value=-1)
    return result


def count_tokens_(counts: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Adds one to `counts` [slots, V] for token `tokens[i]` of slot `slots[i]`, [m] int64 each; lines without a slot
    count nothing, and no slot stands twice."""
    held = slots >= 0
    flat = slots[held] * counts.shape[1] + tokens[held]
    counts.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype))


_BITS = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).bool()  # [byte, bit], lowest bit first
BIAS_OF_BYTE = torch.zeros(256, 8).masked_fill_(_BITS.logical_not(), -torch.inf)


def forbid_tokens_(logits: torch.Tensor, words: torch.Tensor, places: torch.Tensor) -> None:
    """Sets what line i of `words` [m, ceil(vocabulary / 32)] int32 does not allow to -inf, in row `places[i]` of the
    logits [n, vocabulary]. Bit t % 32 of word t // 32 allows token t; `places` [m] int64 are distinct."""
    vocab_size = logits.shape[1]
    biases = BIAS_OF_BYTE.to(logits.device, logits.dtype)
    for line, place in zip(words.contiguous().view(torch.uint8), places.tolist(), strict=True):
        logits[place].add_(biases.index_select(0, line.int()).view(-1)[:vocab_size])


def log_normaliser(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest logit of each row of [n, vocabulary], and the log of the sum of exp(logit - greatest).

    Two numbers and not their sum: logits are subtracted from a number near them first, which is exact enough. Both
    [n, 1], float32 at least.
    """
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    peak = wide.amax(dim=-1, keepdim=True)
    return peak, (wide - peak).logsumexp(dim=-1, keepdim=True)
