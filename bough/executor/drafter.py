"""Drafts by a model beside the served one: what it knows of each row, and its two parts of a step.

Before the forward pass of the served model, the *target*, it guesses tokens behind each decode's own, a chain or a tree
of them (`guess`); what it computes for that is in pages behind those of the rows, and is lost. After it, it computes
the same tokens as the target did (`follow`). It has pages of the same numbers, so whatever is cached of a prompt is
cached for both. Nodes of a tree stand in the row's next places in the order of their scores; those that hold move to
where a chain has them.

A model that reads hidden states of the target stores in a token's place what it makes of the target's hidden state
there and of the token *behind* it. Where a prompt leaves a cached prefix that another request went on from with another
token, the last place of that prefix stands for the other token: the drafts there may be a little worse.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from bough.attention.base import AttentionBackend
from bough.attention.batch import AttentionBatch, decodes_of
from bough.attention.context import ForwardContext
from bough.attention.reading import ToDevice
from bough.core.plan import BatchPlan, IntArray, Limits
from bough.executor.layout import LongArray, StepLayout
from bough.executor.verification import Verified
from bough.memory.pools.kv_pool import KVPool
from bough.models.drafts import DraftModel
from bough.sampling.state import Agree

Tapped = dict[int, torch.Tensor | None]


class Guessed(NamedTuple):
    """The drafts of all decodes, row by row."""

    tokens: torch.Tensor  # int64
    parents: IntArray | None = None  # `BatchPlan.parents`


class Drafter:
    """Owns what the draft model keeps of the rows between two steps."""

    def __init__(
        self,
        model: DraftModel,
        pool: KVPool,
        attention: AttentionBackend,
        limits: Limits,
        agree: Agree,
        *,
        target: KVPool,
        topk: int = 1,
        dtype: torch.dtype,
        device: torch.device,
        to_device: ToDevice = torch.from_numpy,
    ) -> None:
        self._model, self._pool, self._attention, self._target = model, pool, attention, target
        self._page_size, self._to_device, self._agree = limits.page_size, to_device, agree
        self._topk, self._levels = topk, limits.draft_levels or limits.drafts
        self._last_place = limits.context_length - 1
        self._scratch = (limits.pages[0] + 1) * limits.page_size  # the first slot behind those of rows
        # Of a model that is ahead: the first drafts of the row's next step, and the hidden state that gave them.
        self._first = torch.zeros((limits.rows + 1, topk), dtype=torch.int64, device=device)
        self._scores = torch.zeros((limits.rows + 1, topk), device=device)
        self._hidden = torch.zeros((limits.rows + 1, model.config.hidden_size), dtype=dtype, device=device)

    @property
    def reads_hidden(self) -> bool:
        """Whether it wants the target's hidden states, of all tokens."""
        return self._model.ahead

    def taps(self) -> Tapped | None:
        """For the context of the target's forward pass."""
        draft = self._model.config.draft
        return dict.fromkeys(draft.taps) if draft is not None and draft.taps else None

    def guess(
        self, plan: BatchPlan, layout: StepLayout, page_tables: tuple[torch.Tensor, ...], last: torch.Tensor
    ) -> Guessed:
        """`last` are the tokens that the decodes begin with. On each level the `topk` likeliest paths, the beams, go on
        with as many tokens each. Of all these nodes those with the best scores are chosen; one beam is a chain."""
        wanted, topk = plan.query_lens[: len(last)] - 1, self._topk
        live: LongArray = np.flatnonzero(wanted)
        most, count, beams = int(wanted.max()), len(live), len(live) * topk
        if self._model.ahead:
            rows = self._to_device(plan.rows[live].astype(np.int64))
            tokens, scores, hidden = self._first[rows], self._scores[rows], self._hidden[rows]
        else:
            known, at = layout.context_lens[live], layout.query_starts[live]
            slots = tuple(self._to_device(np.ascontiguousarray(layout.slots[:, at])))
            rows, positions = self._to_device(layout.rows[live]), self._to_device(layout.positions[at])
            lengths = self._to_device(known + 1)
            batch = decodes_of(rows, lengths, positions, slots, page_tables, self._page_size, known)
            hidden, computed = self._advance(last[self._to_device(live)], None, batch)
            tokens, scores = self._best(hidden, computed)
        context = layout.context_lens[live].repeat(topk) + (not self._model.ahead)  # of each beam
        levels = min(self._levels, most)
        lines = self._prefixes(page_tables[0], plan.rows[live], int(context.max()) + levels).repeat_interleave(topk, 0)
        begin, numbers = self._to_device(context.astype(np.int64)), torch.arange(beams, device=last.device)
        path, hidden = lines[:, :0], hidden.repeat_interleave(topk, 0)
        nodes = torch.arange(topk, device=last.device).expand(count, topk)  # the beams' places among all nodes
        found = [(tokens, scores, torch.full_like(tokens, -1))]  # and the nodes that they follow
        for level in range(1, levels):
            own = self._scratch + (level - 1) * beams + numbers
            path = torch.cat((path, own[:, None].int()), 1)
            lines.scatter_(1, begin[:, None] + numbers.new_tensor(range(level)), path)
            # A beam that its row has no place for is not chosen in the end.
            at = np.minimum(context + level - 1, self._last_place).astype(np.int32)
            lengths, positions = self._to_device(at + 1), self._to_device(at.astype(np.int64))
            batch = decodes_of(numbers.int(), lengths, positions, (own,), (lines,), 1, at)
            hidden, computed = self._advance(tokens.flatten(), hidden, batch)
            further, chances = self._best(hidden, computed)
            further, totals = further.view(count, -1), (scores.reshape(beams, 1) + chances).view(count, -1)
            found.append((further, totals, nodes.repeat_interleave(topk, 1)))
            scores, best = totals.topk(topk)
            nodes, tokens = best + topk + (level - 1) * topk * topk, further.gather(1, best)
            origin = (best // topk + numbers.view(count, topk)[:, :1]).flatten()
            hidden, path = hidden[origin], path[origin]
        tokens, totals, follows = (torch.cat(part, 1) for part in zip(*found, strict=True))
        # No node scores better than the one that it follows, and of equals the earlier comes first: parents do.
        totals = totals if topk > 1 else torch.zeros_like(totals)
        order = totals.argsort(dim=1, descending=True, stable=True)
        rank = order.argsort(1) + 1
        order = order[:, :most]
        follows = follows.gather(1, order)
        parents = torch.where(follows < 0, 0, rank.gather(1, follows.clamp_min(0)))
        chosen = torch.stack((tokens.gather(1, order), parents)).cpu().numpy()[:, np.arange(most) < wanted[live, None]]
        found_tokens = self._to_device(np.ascontiguousarray(chosen[0]))
        return Guessed(found_tokens, chosen[1].astype(np.int32) if topk > 1 else None)

    def _prefixes(self, table: torch.Tensor, rows: IntArray, length: int) -> torch.Tensor:
        """The slots of the rows' first tokens. [rows, length] int32"""
        size, at = self._page_size, torch.arange(length, device=table.device)
        pages = table[self._to_device(rows.astype(np.int64))[:, None], (at // size).clamp_max(table.shape[1] - 1)]
        return pages * size + (at % size).int()

    def _advance(
        self, tokens: torch.Tensor, hidden: torch.Tensor | None, batch: AttentionBatch
    ) -> tuple[torch.Tensor, ForwardContext]:
        """The hidden states of these tokens, and what they were computed with."""
        self._attention.prepare(batch)
        context = ForwardContext(self._attention, self._pool, batch)
        return self._model.advance(tokens, hidden, context), context

    def _best(self, hidden: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens behind these states, with their scores. [n, topk]"""
        best, scores = self._model.best(hidden, context, self._topk)
        return self._agree(best), scores if self._topk == 1 else self._agree(scores)

    def follow(
        self,
        plan: BatchPlan,
        layout: StepLayout,
        batch: AttentionBatch,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        tapped: Tapped | None,
        sampled: Verified,
    ) -> None:
        """The target has computed these tokens, with these hidden states, and its rows have got what was sampled.
        `batch` has them as chains."""
        tokens, counts = sampled.tokens, sampled.counts
        if plan.parents is not None:
            order = self._straighten(plan, layout, sampled)
            token_ids, hidden = token_ids[order], hidden[order] if self.reads_hidden else hidden
            tapped = {tap: None if of is None else of[order] for tap, of in (tapped or {}).items()} or None
        if not self._model.ahead:
            end = self._to_device(np.array([len(token_ids) - 1]))  # of what comes out nothing is looked at
            self._attention.prepare(batch)
            self._model.advance(token_ids, None, ForwardContext(self._attention, self._pool, batch, end))
            return
        behind, last = tokens_behind(plan, layout, tokens, counts)
        rows, taken = plan.rows[plan.sample].astype(np.int64), self.take_in(hidden, tapped, batch)
        self.read(self._to_device(rows), batch, self._to_device(behind), taken, self._to_device(last))

    def take_in(self, hidden: torch.Tensor, tapped: Tapped | None, batch: AttentionBatch) -> torch.Tensor:
        """What it reads of the target's hidden states."""
        draft = self._model.config.draft
        read = [hidden] if tapped is None or draft is None else [tapped[tap] for tap in draft.taps]
        context = ForwardContext(self._attention, self._pool, batch)
        return self._model.take_in([states for states in read if states is not None], context)

    def read(
        self, rows: torch.Tensor, batch: AttentionBatch, behind: torch.Tensor, taken: torch.Tensor, last: torch.Tensor
    ) -> None:
        """Computes each of the target's tokens from what it took in there and the token behind, and guesses what comes
        after `last`, those that hold of each of the rows."""
        found, context = self._advance(behind, taken, batch)
        if len(last):
            self._hidden[rows] = found = found[last]
            self._first[rows], scores = self._best(found, context)
            if self._topk > 1:
                self._scores[rows] = scores

    def chain(self, tokens: torch.Tensor, rows: torch.Tensor, batch_of: Callable[[slice], AttentionBatch]) -> None:
        """Guesses behind the first of `tokens` [width, rows], in place; `batch_of` gives columns of the step."""
        width, size = tokens.shape
        ahead, last, hidden = self._model.ahead, tokens[0], None
        if ahead and width > 1:
            last, hidden = self._first[rows, 0], self._hidden[rows]
            tokens[1].copy_(last)
        for column in range(width - 2 if ahead else width):  # one that is not ahead computes the last draft as well
            hidden, context = self._advance(last, hidden, batch_of(slice(column * size, (column + 1) * size)))
            if column + ahead + 1 < width:
                last = self._best(hidden, context)[0][:, 0]
                tokens[column + ahead + 1].copy_(last)

    def _straighten(self, plan: BatchPlan, layout: StepLayout, sampled: Verified) -> torch.Tensor:
        """Moves what the target keeps of the drafts that hold to where a chain of them stands. Which token of the step
        each place has now."""
        order, columns = np.arange(len(layout.token_ids)), np.arange(1, sampled.tokens.shape[1])
        held, first = columns < sampled.counts[:, None], layout.query_starts[1:][plan.sample] - sampled.widths
        origin, to = ((first[:, None] + places)[held] for places in (sampled.path[:, 1:], columns))
        order[to] = origin
        for group, slots in zip(self._target.groups, layout.slots, strict=True):
            group.move(self._to_device(slots[origin]), self._to_device(slots[to]))
        return self._to_device(order)


def tokens_behind(
    plan: BatchPlan, layout: StepLayout, tokens: LongArray, counts: IntArray
) -> tuple[LongArray, LongArray]:
    """The token behind each of a step, as far as it holds; and where the last that holds of each sampling row is."""
    behind = np.roll(layout.token_ids, -1)
    ends, widths = layout.query_starts[1:].astype(np.int64), plan.sample_widths
    if plan.next_tokens is not None:
        behind[ends[len(ends) - len(plan.next_tokens) :] - 1] = plan.next_tokens
    first = ends[plan.sample] - widths
    columns = np.arange(tokens.shape[1])
    behind[(first[:, None] + columns)[columns < widths[:, None]]] = tokens[columns < widths[:, None]]
    return behind, first + counts - 1


def with_drafts(plan: BatchPlan, drafts: Guessed) -> BatchPlan:
    """The same plan, with the tokens that the device has guessed as if they were given. Decodes stand first."""
    decodes = plan.given < plan.query_lens
    given = np.where(decodes, plan.query_lens - 1, plan.given).astype(np.int32)
    tokens = drafts.tokens.cpu().numpy().astype(np.int32)
    return replace(plan, given=given, tokens=np.concatenate([tokens, plan.tokens]), parents=drafts.parents)
