"""Device memory that a step may need beside the forward pass, as arithmetic over the shape of the model and the batch.

The forward pass is measured; what only rare requests need (penalties, biases, logprobs) is counted here for the worst
case, in which every row asks for it, so that no request can ever find the device full. Logprobs are worked through in
blocks of positions (`sampling.logprobs`), whose results go to the host one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bough.core.sampling_params import MAX_LOGPROBS
from bough.sampling.logprobs import INPUT_BLOCK

FLOAT_BYTES = 4
RESULT_BYTES = 8 + 4  # of a token that a position's logprobs tell of: its id, and how likely it was
RESULT_COPIES = 2  # of those: as they are found, and normalised
SLOT_BYTES = 4 + 1 + 4  # per row and token: counts of outputs, which prompt tokens there are, bias
GRAPH_BYTES = 4 << 20  # what the driver keeps of a graph
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
        """Logits of all rows, and on top either a line apart for each with the copy that a request's own code is given
        (filters take less), or what logprobs need once these are gone. Prompts are scored before, without the
        logits."""
        line = self.vocab_size * FLOAT_BYTES
        return self.rows * self.vocab_size * self.logit_itemsize + max(2 * self.rows * line, self.scoring_bytes())

    def scoring_bytes(self) -> int:
        """A block of positions whose logprobs are asked: its logits, widened or sorted, and what it tells."""
        positions = min(self.rows + self.chunk_tokens, INPUT_BLOCK)
        logits = self.vocab_size * (self.logit_itemsize + FLOAT_BYTES)
        return positions * (logits + min(MAX_LOGPROBS, self.vocab_size) * RESULT_BYTES * RESULT_COPIES)

    def row_bytes(self) -> int:
        """What all rows together may come to hold: page tables, and slots as wide as the vocabulary."""
        pages = -(-self.context_length // self.page_size)
        return (self.rows + 1) * 4 * pages + (self.rows + 1) * self.vocab_size * SLOT_BYTES

    def graph_scratch_bytes(self, decode: Sequence[int], mixed: Sequence[int], forward_bytes: int) -> int:
        """What the largest captured step needs while it runs: activations, or logits, and their copies where they are
        widened. All graphs share it."""
        activations = forward_bytes * max((0, *decode, *mixed)) // (self.rows + self.chunk_tokens)
        widened = 2 * self.logit_itemsize if self.logit_itemsize > self.itemsize else 0
        return max(activations, max((0, *decode)) * self.vocab_size * (self.itemsize + widened))
