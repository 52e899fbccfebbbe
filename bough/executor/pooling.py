"""Hidden states to vectors: of rows that want one, what they have gathered of their prompts so far, and its end.

A prompt may come in chunks, so a mean is a sum until the last of them. What is pooled goes through the model's head, if
that scores labels; or else it is cut and normalised, in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from bough.core.plan import BatchPlan, FloatArray, RowSetup
from bough.core.pooling import Pooling, VectorConfig
from bough.executor.layout import StepLayout
from bough.kernels.experts.reference import Chosen
from bough.models.base import CausalLM


@dataclass(slots=True)
class Gathered:
    wanted: Pooling
    prompt_len: int
    sum: torch.Tensor | None = None  # or the first token's state


class Pooler:
    """Owns the rows that end with a vector."""

    def __init__(self, model: CausalLM, chosen: Chosen | None = None) -> None:
        """`chosen` gets the experts of a step's tokens, where they are recorded."""
        self._config, self._head = model.config.vectors or VectorConfig(), model.label_head
        self._chosen = Chosen() if chosen is None else chosen
        self._model, self._context = model.config, model.config.context_length
        self._typed = model.config.positions > self._context
        self._rows: dict[int, Gathered] = {}

    def set_up(self, setups: Sequence[RowSetup]) -> None:
        for setup in setups:
            self._rows.pop(setup.row, None)
            if setup.pooling is not None:
                self._rows[setup.row] = Gathered(setup.pooling, setup.prompt_len)

    def wanted(self, plan: BatchPlan) -> bool:
        """Whether some row gives a vector, now or later."""
        wanted = {self._rows[row].wanted.mode for row in plan.rows.tolist() if row in self._rows} if self._rows else ()
        self._chosen.asked = "experts" in wanted
        return bool(wanted)

    def place_types(self, plan: BatchPlan, layout: StepLayout) -> None:
        """Gives tokens of second texts the positions of their type: see `PlaceTable`."""
        for i, row in enumerate(plan.rows.tolist() if self._typed and self._rows else ()):
            if row in self._rows and (second := self._rows[row].wanted.second) is not None:
                positions = layout.positions[layout.query_starts[i] : layout.query_starts[i + 1]]
                positions[positions >= second] += self._context

    @torch.inference_mode()
    def pool(self, plan: BatchPlan, layout: StepLayout, hidden: torch.Tensor) -> dict[int, FloatArray]:
        """The vectors of the prompts that end with this step, of the hidden states of all its tokens; of rows that want
        all states or the experts of all tokens, those, which a GPU has copied when the step is done."""
        whole: dict[int, FloatArray] = {}
        ended: dict[Pooling, list[int]] = {}
        given: dict[str | None, torch.Tensor] = {}  # by mode, what this step adds to the vector of each row
        starts, ends = layout.query_starts.tolist(), layout.lengths.tolist()
        for i, row in enumerate(plan.rows.tolist()):
            if (gathered := self._rows.get(row)) is None:
                continue
            mode, tokens = gathered.wanted.mode, slice(starts[i], starts[i + 1])
            if mode == "align":  # `Hearing` gives it
                continue
            if mode == "all":
                whole[i] = hidden[tokens].float().to("cpu", non_blocking=True, copy=True).numpy()
                continue
            if mode == "experts":
                whole[i] = self._experts(tokens)
                continue
            if mode not in given:
                given[mode] = _given(mode, layout, hidden)
            if gathered.sum is not None:
                given[mode][i] = gathered.sum + given[mode][i] if mode == "mean" else gathered.sum
            if ends[i] < gathered.prompt_len:
                gathered.sum = given[mode][i] if mode in ("mean", "cls") else None
            else:
                ended.setdefault(msgspec.structs.replace(gathered.wanted, second=None), []).append(i)
                del self._rows[row]
        for wanted, rows in ended.items():  # all of one kind at once: a GPU's host pays for each operation
            vectors = given[wanted.mode][rows]
            if wanted.mode == "mean":
                vectors /= torch.from_numpy(layout.lengths[rows]).to(vectors)[:, None]
            found = self._shaped(vectors, wanted) if self._head is None else self._head(vectors)
            whole |= zip(rows, found.cpu().numpy(), strict=True)
        self._chosen.asked = False
        self._chosen.clear()
        return whole

    def _experts(self, tokens: slice) -> FloatArray:
        """Those of all layers, [tokens, layers * per_token] int32 in the place of floats; dense layers have zeros."""
        has = [self._model.experts_of(layer) is not None for layer in range(self._model.num_layers)]
        found = iter([ids[tokens].int() for ids in self._chosen[-sum(has) :]])  # a draft model's came before
        blank = torch.zeros_like(self._chosen[-1][tokens], dtype=torch.int32)
        joined = torch.cat([next(found) if each else blank for each in has], 1)
        return joined.to("cpu", non_blocking=True).numpy().view(np.float32)

    def _shaped(self, vectors: torch.Tensor, wanted: Pooling) -> torch.Tensor:
        normalize = self._config.normalize if wanted.normalize is None else wanted.normalize
        return F.normalize(vectors[:, : wanted.dimensions]) if normalize else vectors[:, : wanted.dimensions]


def _given(mode: str | None, layout: StepLayout, hidden: torch.Tensor) -> torch.Tensor:
    """Of each row of a step the sum of its tokens' states, the first or the last of them. [rows, hidden] float32"""
    starts = torch.from_numpy(layout.query_starts.astype(np.int64)).to(hidden.device, non_blocking=True)
    if mode == "mean":
        states = hidden[: layout.query_starts[-1]].float()
        return torch.segment_reduce(states, "sum", lengths=starts.diff(), unsafe=True)
    return hidden.index_select(0, starts[:-1] if mode == "cls" else starts[1:] - 1).float()
