"""The executor for devices that torch drives synchronously: it runs each plan to its end before it returns.

Puts the parts together and owns none of the arithmetic: rows → forward pass → logits of the rows that want them →
sampling. `threaded` wraps it so that the scheduler need not wait.
"""

import time
from dataclasses import replace
from functools import partial

import torch

from bough.attention.base import AttentionBackend
from bough.attention.context import ForwardContext
from bough.attention.reading import ToDevice
from bough.core.control import Command, CommandResult
from bough.core.plan import BatchPlan, Limits, StepResult
from bough.distributed.group import ALONE, RankGroup
from bough.executor.adapters import AdapterStore, adapter_rows, logits_of
from bough.executor.control import ModelControl
from bough.executor.drafter import Drafter, with_drafts
from bough.executor.encoder import Encoder
from bough.executor.hearing import Hearing
from bough.executor.layout import StepLayout, has_drafts, sampled_tokens
from bough.executor.plain_plans import run_padding
from bough.executor.pooling import Pooler
from bough.executor.rank_check import RankCheck
from bough.executor.threaded import StepMasks
from bough.executor.verification import Draw, HostRows, draw_by_torch, prompt_logprobs
from bough.executor.weights import WeightStore
from bough.memory.pools.kv_pool import KVPool
from bough.memory.pools.state_pool import StateCopies
from bough.models.base import CausalLM
from bough.models.whisper_model import WhisperModel


class TorchExecutor:
    """Runs plans on the calling thread."""

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        attention: AttentionBackend,
        limits: Limits,
        weights: WeightStore | None = None,
        group: RankGroup = ALONE,
        check: RankCheck | None = None,
        drafter: Drafter | None = None,
        adapters: AdapterStore | None = None,
        encoder: Encoder | None = None,
        to_device: ToDevice = torch.from_numpy,
    ) -> None:
        self._model, self._to_device = model, to_device
        self._pool = pool
        self._attention = attention
        self._limits = limits
        self._group = group
        self._check = check
        self._drafter, self._encoder = drafter, encoder
        self._pooler = Pooler(model, None if weights is None else weights.experts.chosen)
        self._hearing = Hearing(model) if isinstance(model, WhisperModel) else None
        self._rows = HostRows(limits, group.from_first if check is None else check.tokens)
        self._states = StateCopies(pool.states, self._rows.mirror.pages[-1], to_device)
        self._join = torch.inference_mode()(partial(run_padding, model, attention, pool, limits))
        self._control = ModelControl(weights, pool, group, join=self._join, adapters=adapters)

    def limits(self) -> Limits:
        return self._limits

    def control(self, command: Command) -> CommandResult:
        return self._control.run(command)

    @torch.inference_mode()
    def run(self, plan: BatchPlan, masks: StepMasks) -> StepResult:
        self._group.doing = f"step {plan.step}"
        self._control.begin_step()
        if not len(plan.rows):
            self._join()
            return StepResult.without_tokens(plan.step, {})
        self._pooler.set_up(plan.setups)
        plan = self._rows.align(plan)
        layout, to_device = self._rows.apply(plan), self._to_device
        width = -(-int(layout.lengths.max()) // self._limits.page_size)
        page_tables = tuple(to_device(self._rows.mirror.pages[:, :, :width]))
        pooled = self._pooler.wanted(plan)
        self._pooler.place_types(plan, layout)
        if self._check is not None:
            self._check.rows(plan, self._rows.mirror)
        drafter, taps, hearing = None if plan.undrafted else self._drafter, None, self._hearing
        if drafter is not None:
            plan, taps = self._guess(drafter, plan, layout, page_tables), drafter.taps()
        if self._drafter is not None:
            masks.drafted.set_result(plan)
        both_ways = None if self._encoder is None else self._encoder.both_ways(plan, layout)
        batch = chain = layout.batch(to_device, page_tables, self._limits.page_size, both_ways)
        if plan.parents is not None:
            batch = self._rows.mirror.tree_batch(layout, plan.parents, to_device, both_ways)
        self._attention.prepare(batch)
        began = time.monotonic()
        media = None if self._encoder is None else self._encoder.run(plan, layout)
        encode_s = time.monotonic() - began if plan.encodes else 0.0
        self._states.begin(plan.setups)
        ends = sampled_tokens(plan, layout.query_starts)
        last, adapters = to_device(ends), adapter_rows(layout.adapters, ends)
        whole = plan.input_logprobs or pooled or (drafter is not None and drafter.reads_hidden)
        context = ForwardContext(self._attention, self._pool, batch, None if whole else last, taps, adapters, media)
        if hearing is not None:
            context = hearing.begin(plan, context)
        token_ids = to_device(layout.token_ids)
        hidden = self._model.forward(token_ids, context)
        self._states.keep(plan)
        if not self._group.topology.is_last:
            return StepResult.without_tokens(plan.step, {})

        starts, sampling = layout.query_starts, self._rows.sampling
        scoring = (partial(logits_of, self._model, layout.adapters), to_device)
        inputs = prompt_logprobs(plan, sampling, hidden, starts, *scoring)
        vectors = self._pooler.pool(plan, layout, hidden) if pooled else {}
        vectors |= {} if hearing is None else hearing.align(plan, layout, context.aligned)
        asked = hidden.index_select(0, last) if whole else hidden
        ended = None if adapters is None else lambda: adapters.ends
        logits = self._model.logits(asked, ended).float() if plan.sample.any() else asked  # which is not looked at then
        logits = logits.cpu()
        if hidden.is_cuda:
            torch.cuda.current_stream(hidden.device).synchronize()  # vectors, too, have then been copied
        draw: Draw = partial(draw_by_torch, sampling)
        draw = draw if hearing is None else hearing.ruled(draw)
        sampled = self._rows.finish(plan, logits, draw, masks)
        self._states.settle(plan, sampled.counts)
        result = sampled.result(plan, logits, sampling, inputs, vectors)
        if drafter is not None:
            drafter.follow(plan, layout, chain, token_ids, hidden, taps, sampled)
        if self._encoder is not None and plan.encodes:
            return replace(result, encode_s=encode_s, not_encoded=self._encoder.take_failed())
        return result

    def _guess(
        self, drafter: Drafter, plan: BatchPlan, layout: StepLayout, page_tables: tuple[torch.Tensor, ...]
    ) -> BatchPlan:
        """The plan with the drafts of its decodes, which are put in their places."""
        if not has_drafts(plan):
            return plan
        last = self._to_device(layout.token_ids[layout.from_device])
        plan = with_drafts(plan, guessed := drafter.guess(plan, layout, page_tables, last))
        layout.token_ids[layout.draft_places] = guessed.tokens.numpy()
        return plan
