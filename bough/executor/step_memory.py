"""Device memory that a step may need beside the forward pass, as arithmetic over the shape of the model and the batch.

The forward pass is measured; what only rare requests need (penalties, biases, logprobs) is counted here for the worst
case, in which every row asks for it, so that no request can ever find the device full. Logprobs are worked through in
blocks of positions, whose size is that of `sampling.logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bough.core.sampling_params import MAX_LOGPROBS
from bough.sampling.logprobs import INPUT_BLOCK

FLOAT_BYTES = 4
SCORE_COPIES = 4  # of a block's logits: widened, centred, and two inside the normaliser
RESULT_BYTES = 8 + 4  # of a token that a position's logprobs tell of: its id, and how likely it was
RESULT_COPIES = 2  # of those: the blocks', and all of them joined
SLOT_BYTES = 4 + 1 + 4  # per row and token: counts of outputs, which prompt tokens there are, bias
SLOT_GROWTH = 2  # when there must be more slots, the old ones are still there while the new are filled
GRAPH_BYTES = 4 << 20  # what the driver keeps of a captured step
LIBRARY_BYTES = 256 << 20  # workspaces of libraries and code of kernels that are loaded later


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the largest step is made of."""

    rows: int
    chunk_tokens: int
    vocab_size: int
    hidden_size: int
    context_length: int
    page_size: int
    itemsize: int  # bytes of a weight, a hidden state
    logit_itemsize: int  # of a logit as the model gives it

    def step_bytes(self, forward_bytes: int) -> int:
        """The most that a step needs at once, given what its forward pass was measured to need."""
        hidden = (self.rows + self.chunk_tokens) * self.hidden_size * self.itemsize
        return max(forward_bytes, hidden + self.sampling_bytes())

    def sampling_bytes(self) -> int:
        """Logits of all rows, a line apart for each, and what processors, filters or logprobs make of them."""
        logits = self.rows * self.vocab_size * (self.logit_itemsize + FLOAT_BYTES)
        processed = self.rows * self.vocab_size * FLOAT_BYTES  # the copy that a request's own code is given
        candidates = self.rows * self.vocab_size  # of top-p and top-k, below a byte per logit
        return logits + max(
            processed, candidates, self.scoring_bytes()
        )  # prompts are scored before, without the logits

    def scoring_bytes(self) -> int:
        """A block of positions whose logprobs are asked, and what all positions tell."""
        positions = self.rows + self.chunk_tokens
        block = min(positions, INPUT_BLOCK) * self.vocab_size * (self.logit_itemsize + FLOAT_BYTES * SCORE_COPIES)
        return block + positions * min(MAX_LOGPROBS, self.vocab_size) * RESULT_BYTES * RESULT_COPIES

    def row_bytes(self) -> int:
        """What all rows together may come to hold: page tables, and slots as wide as the vocabulary."""
        pages = -(-self.context_length // self.page_size)
        return (self.rows + 1) * 4 * pages + self.rows * self.vocab_size * SLOT_BYTES * SLOT_GROWTH

    def graph_bytes(self, decode: Sequence[int], mixed: Sequence[int], forward_bytes: int) -> int:
        """What captured steps of so many rows or tokens keep: logits of each decode step, hidden states of the rows of
        each mixed one, and a single set of activations for all."""
        largest = max((0, *decode, *mixed))
        activations = forward_bytes * largest // (self.rows + self.chunk_tokens)
        logits = sum(decode) * self.vocab_size * self.logit_itemsize
        hidden = sum(min(self.rows, tokens) for tokens in mixed) * self.hidden_size * self.itemsize
        return activations + logits + hidden + (len(decode) + len(mixed)) * GRAPH_BYTES
