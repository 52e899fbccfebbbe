"""Times penalties on a CUDA device beside the same in plain torch operations; a script, run by hand.

First the adjustment alone: the kernel, and torch's operations on the same lines. Then a whole sampling step as it is
launched, of a batch in which some rows have penalties: with lines apart for those, and with the batch widened to
float32, which is what plain operations have to do. The column without penalties is what the others would cost alone.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
from torch import Tensor

from bough.core.plan import RowSetup
from bough.core.sampling_params import SamplingParams
from bough.kernels.logits.reference import PenaltyLines, PenaltyStore
from bough.kernels.logits.triton import penalise
from bough.kernels.sampling.triton import sample_rows
from bough.sampling.sampler import sample_rows_on_device
from bough.sampling.state import SamplingState
from tests.kernels.gpu_timing import distance, graph_us, table_row

VOCAB_SIZE = 151_936
BATCHES = ((1, 1), (16, 1), (256, 1), (256, 32), (256, 256), (512, 1))  # rows, and those with penalties
PARAMS = SamplingParams(
    temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1, logit_bias={5: 1.0}
)
WIDTHS = (5, 9, 12, 12, 9, 12, 12, 12)


def make_state(n: int, penalised: int) -> SamplingState:
    state = SamplingState(n, VOCAB_SIZE, "cuda")
    rng, none = np.random.default_rng(n), np.zeros(0, dtype=np.int32)
    for row in range(n):
        history = rng.integers(0, VOCAB_SIZE, 2000, dtype=np.int32)
        params = PARAMS if row < penalised else SamplingParams(temperature=0.7)
        state.setup([RowSetup(row, params, row, (none,), 0, 500, history, 1500, None, ())])
    return state


def plain_lines(logits: Tensor, lines: PenaltyLines, store: PenaltyStore) -> Tensor:
    """What the kernel does, one torch operation after the other."""
    values = logits.index_select(0, lines.places).float()
    values.add_(store.bias.index_select(0, lines.bias_slots))
    counts = store.counts.index_select(0, lines.count_slots)
    seen = (counts > 0).logical_or_(store.prompts.index_select(0, lines.prompt_slots))
    penalty = store.repetition[lines.rows, None]
    values = torch.where(seen, torch.where(values > 0, values / penalty, values * penalty), values)
    values.addcmul_(counts, store.frequency[lines.rows, None], value=-1)
    return values.addcmul_(counts.clamp_(max=1), store.presence[lines.rows, None], value=-1)


def plain_step(state: SamplingState, logits: Tensor, rows: Tensor, lines: PenaltyLines) -> Tensor:
    """A step with the whole batch in float32."""
    wide = logits.float()
    wide.index_copy_(0, lines.places, plain_lines(logits, lines, state.penalties))
    tokens, _ = sample_rows(wide, rows, state.parameters, False)
    flat = lines.count_slots * VOCAB_SIZE + tokens.index_select(0, lines.places)
    counts = state.output_counts.tensor.view(-1)
    counts.index_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype))
    return tokens


def launched_us(step: object) -> float:
    return float(triton.testing.do_bench(step, warmup=10, rep=50, return_mode="median")) * 1e3


def main() -> None:
    names = ("rows", "penalised", "kernel µs", "torch µs", "distance", "step µs", "widened µs", "without µs")
    print(table_row(names, WIDTHS))
    for n, penalised in BATCHES:
        state, clean = make_state(n, penalised), make_state(n, 0)
        logits = torch.randn(n, VOCAB_SIZE, device="cuda").mul_(4.0).bfloat16()
        numbers, rows = np.arange(n, dtype=np.int32), torch.arange(n, device="cuda")
        store, lines = state.penalties, state.penalty_lines(np.arange(penalised), numbers[:penalised])
        apart, plain = penalise(logits, lines, store), plain_lines(logits, lines, store)
        times = (
            graph_us(lambda _: penalise(logits, lines, store)),  # noqa: B023
            graph_us(lambda _: plain_lines(logits, lines, store)),  # noqa: B023
        )
        steps = (
            launched_us(lambda: sample_rows_on_device(state, logits, rows, numbers)),  # noqa: B023
            launched_us(lambda: plain_step(state, logits, rows, lines)),  # noqa: B023
            launched_us(lambda: sample_rows_on_device(clean, logits, rows, numbers)),  # noqa: B023
        )
        cells = [
            n,
            penalised,
            *(f"{t:.1f}" for t in times),
            f"{distance(apart, plain):.0e}",
            *(f"{t:.1f}" for t in steps),
        ]
        print(table_row(cells, WIDTHS), flush=True)


if __name__ == "__main__":
    main()
