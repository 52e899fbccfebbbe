"""The executor for GPUs: everything is queued, nothing is waited for.

`launch` copies a step's few integers to the device, queues the forward pass (a captured graph, or kernel by kernel
where there is none), the sampling and the copy of the tokens back to pinned memory, and returns. Sampled tokens stay on
the device as the input of the next step. The order of things on the stream is described in `cuda_inputs`.

A step with masked rows is queued in two parts: `launch` stops at the logits, and `supply_masks` queues the rest. By
then the device is at work on the forward pass, so it hardly ever waits for a grammar.

Steps with drafts, and decodes beside a draft model, are `cuda_drafts`': how many drafts hold stays on the device. Where
rows have grammars, penalties or logprobs, and for prompts beside a draft model, the host verifies, and waits.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bough.attention.base import AttentionBackend
from bough.attention.batch import AttentionBatch
from bough.attention.context import AdaptedRows, ForwardContext, MediaRows
from bough.attention.torch_backend import TorchAttention
from bough.core.control import Command, CommandResult, CopyPagesIn, CopyPagesOut, PlaceAdapter, ReadAdapter, Ticket
from bough.core.plan import BatchPlan, InFlight, IntArray, Limits, TokenMasks
from bough.distributed.group import ALONE, RankGroup
from bough.executor.adapters import NO_ROWS, AdapterInputs, AdapterStore, logits_of
from bough.executor.control import ModelControl
from bough.executor.cuda_copies import PageCopies
from bough.executor.cuda_drafts import MOST_TOKENS, DraftedSteps
from bough.executor.cuda_inputs import CudaInputs, MixedInputs
from bough.executor.cuda_steps import NOTHING_BESIDE, Beside, CudaStep, DeviceClock, Follow, MaskedStep, VerifiedStep
from bough.executor.drafter import Drafter, Tapped, with_drafts
from bough.executor.encoder import Encoder
from bough.executor.graphs import USES_BEFORE_CAPTURE, Captured, CudaGraphs, GraphMemory, GraphSizes
from bough.executor.layout import Growth, StepLayout, has_drafts, sampled_tokens
from bough.executor.plain_plans import run_padding
from bough.executor.pooling import Pooler
from bough.executor.rank_check import RankCheck
from bough.executor.staging import Staging
from bough.executor.threaded import Running
from bough.executor.verification import NOTHING, Drawn, prompt_logprobs, sample_step
from bough.executor.vision_graphs import VisionGraphs
from bough.executor.warm_up import WarmUp, rare_pieces
from bough.executor.weights import WeightStore
from bough.kernels.lora.reference import AdapterRows
from bough.kernels.projected_decode.triton import worth
from bough.kernels.sampling.triton import sample_rows
from bough.memory.pools.kv_pool import KVPool
from bough.memory.pools.state_pool import StateCopies
from bough.models.base import CausalLM
from bough.sampling.logprobs import output_logprobs
from bough.sampling.masks import BatchMasks
from bough.sampling.sampler import sample_rows_on_device
from bough.sampling.state import SamplingState

SHORT_CHUNK = 4  # tokens of a prompt, which with others fills a block of queries
UNUSUAL_TOKENS = 1_499  # neither few nor a whole chunk, nor a multiple of anything


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A decode step: the forward pass up to the hidden states, and the logits and sampling of rows that ask for nothing
    special; None where another stage has these."""

    forward: Captured[torch.Tensor]
    sample: Captured[torch.Tensor] | None


class CudaExecutor:
    """Owns the order of work on the stream."""

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        attention: AttentionBackend,
        limits: Limits,
        inputs: CudaInputs,
        mixed: MixedInputs,
        adapted: AdapterInputs,
        staging: Staging,
        sampling: SamplingState,
        *,
        graphs: GraphSizes,
        dtype: torch.dtype,
        weights: WeightStore | None = None,
        group: RankGroup = ALONE,
        check: RankCheck | None = None,
        drafter: Drafter | None = None,
        encoder: Encoder | None = None,
        drafts: int | None = None,  # of a row, that the device verifies by itself; None: nobody makes any
        adapters: AdapterStore | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._limits = limits
        self._samples = group.topology.is_last
        self._check, self._group, self._drafter, self._encoder = check, group, drafter, encoder
        self._both_ways = TorchAttention(staging.to_device)  # the kernels look back only
        self._inputs = inputs
        self._mixed, self._adapted = mixed, adapted
        self._staging = staging
        self._sampling = sampling
        self._pooler = Pooler(model, None if weights is None else weights.experts.chosen)
        self._states = StateCopies(pool.states, inputs.state_table, staging.to_device)
        self._clock = DeviceClock()
        capture_short, capture_decode = (partial(self._capture_decode, few_keys=few) for few in (True, False))
        capture_shared = partial(self._capture_decode, few_keys=False, shared=True)
        self._few_keys_graphs = CudaGraphs("short decode", graphs.few_keys, capture_short)
        self._decode_graphs = CudaGraphs("decode", graphs.decode, capture_decode)
        self._mixed_graphs = CudaGraphs("mixed", graphs.mixed, self._capture_mixed)
        self._shared_graphs = CudaGraphs("shared decode", graphs.shared, capture_shared)
        decode, mixed_sizes = (graphs.decode, graphs.mixed) if graphs.adapted else ((), ())
        capture_adapted = partial(self._capture_decode, few_keys=False, adapted=True)
        self._adapted_graphs = CudaGraphs("adapted decode", decode, capture_adapted)
        also = partial(self._capture_mixed, adapted=True)
        self._adapted_mixed_graphs = CudaGraphs("adapted mixed", mixed_sizes, also)
        self._has_few_keys_graphs = bool(graphs.few_keys)
        device = inputs.last_tokens.device
        self._scratch_bytes = graphs.scratch_bytes
        self._graph_memory = GraphMemory(graphs.scratch_bytes, device)
        # Every graph writes here, so that no graph keeps memory of its own.
        most = max(limits.rows, MOST_TOKENS if drafts else 0)
        self._hidden = torch.zeros((most, model.config.hidden_size), dtype=dtype, device=device)
        parts = limits, inputs, staging, sampling, drafter, drafts
        self._drafted = DraftedSteps(self._forward, model.logits, self._hidden, *parts)
        for few, made in ((True, self._drafted.few_keys), (False, self._drafted.graphs)):
            for width, sizes in (graphs.drafted_few if few else graphs.drafted).items():
                make = partial(self._drafted.capture, width, of=lambda run: self._graph_memory.capture(run), few=few)
                made[width] = CudaGraphs(f"{'short ' * few}{width}-token decode", sizes, make)
        self._graphs: tuple[CudaGraphs[Any], ...] = self._few_keys_graphs, self._decode_graphs, self._mixed_graphs
        self._graphs += (self._shared_graphs, *self._drafted.few_keys.values())  # in the order of capture
        self._graphs += tuple(self._drafted.graphs.values())
        self._graphs += (self._adapted_graphs, self._adapted_mixed_graphs)
        if encoder is not None and encoder.tower is not None and graphs.decode:
            self._graphs += (VisionGraphs(encoder.tower, lambda run: self._graph_memory.capture(run)).graphs,)
        pieces = rare_pieces(limits.vocab_size, dtype, device)
        self._warm_up = WarmUp(pieces, self._run_unusual, lambda: torch.cuda.set_device(device), group.all_say)
        self._masked: MaskedStep | None = None  # the newest step, while it waits for its masks
        self._join = torch.inference_mode()(partial(run_padding, model, attention, pool, limits))
        self._control = ModelControl(weights, pool, group, join=self._join, drop=self._drop_graphs, adapters=adapters)
        self._copies = PageCopies(pool, device, group)
        # Reading weights takes long, and the scheduler answers meanwhile.
        self._commands = ThreadPoolExecutor(1, "commands", initializer=lambda: torch.cuda.set_device(device))
        self._command: Future[CommandResult] | None = None  # the last one

    def limits(self) -> Limits:
        return self._limits

    def control(self, command: Command) -> Ticket:
        """Copies are queued like steps, those of adapters too; whatever else changes weights or memory is done while
        nothing is in flight, and later steps wait for it."""
        self._finish_command()
        if isinstance(command, CopyPagesOut | CopyPagesIn):
            return self._copies.start(command)
        if isinstance(command, PlaceAdapter | ReadAdapter):
            queued: Future[CommandResult] = Future()
            queued.set_result(self._control.run(command))
            return Running(queued)
        self._copies.wait_for()
        torch.cuda.synchronize()
        self._command = self._commands.submit(self._control.run, command)
        return Running(self._command)

    def _finish_command(self) -> None:
        if self._command is not None:
            wait([self._command])
            self._command = None

    def _drop_graphs(self) -> None:
        """They hold addresses of weights and pages. They are captured again as after a start."""
        for graphs in self._graphs:
            graphs.clear()
        self._graph_memory = GraphMemory(self._scratch_bytes, self._inputs.last_tokens.device)

    def close(self) -> None:
        self._warm_up.close()
        self._commands.shutdown()
        torch.cuda.synchronize()

    @torch.inference_mode()
    def idle(self, busy: bool = False) -> bool:
        """Uses a quiet moment to have rare kernels compiled or to capture one graph; False when nothing is left. Which
        graph follows from these calls and the plans so far, so ranks that are told the same have the same ones."""
        self._finish_command()
        self._copies.begin_step(by_layer=False)  # a graph must not contain the wait
        if busy:
            return max(self._graphs, key=lambda graphs: graphs.most_wanted[0]).capture_next(1 + USES_BEFORE_CAPTURE)
        return not self._control.asleep and (self._warm_up.advance() or any(g.capture_next() for g in self._graphs))

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> InFlight:
        self._finish_command()
        self._control.begin_step()
        self._clock.start()
        self._staging.next_step()
        if not len(plan.rows):
            self._join()
            return CudaStep(plan, self._clock.stop(), None, None)
        self._sampling.setup(plan.setups)
        self._pooler.set_up(plan.setups)
        pooled = self._pooler.wanted(plan)
        of_host = self._drafted.begin(plan, pooled)
        plan, drafter = plan if of_host is None else of_host, None if plan.undrafted else self._drafter
        growth = self._inputs.apply(plan)
        if self._check is not None:
            self._check.rows(plan, self._inputs.mirror)
        plain = of_host is not None and drafter is None and self._pool.states is None
        self._copies.begin_step(by_layer=plain and len(plan.tokens) > 0)
        self._states.begin(plan.setups)
        if plan.last_tokens is not None:
            rows = plan.rows[: len(plan.last_tokens)]
            self._inputs.advance(*(self._staging.to_device(part.astype(np.int64)) for part in (rows, plan.last_tokens)))
        if of_host is None:
            return self._drafted.launch(plan, growth, self._clock)
        if drafter is None and not (len(plan.tokens) or self._drafted.ahead or pooled):
            return self._launch_decodes(plan, growth)
        layout = self._inputs.lay_out(plan, growth)
        if drafter is not None:
            running = self._launch_drafted(drafter, plan, layout, pooled)
        else:
            running = self._finish(plan, *self._mixed_hidden(plan, layout, pooled))
        self._states.keep(plan)  # which only prompts ask for
        return running

    def drafted(self, step: int) -> BatchPlan:
        assert self._masked is not None and self._masked.plan.step == step
        return self._masked.plan

    @torch.inference_mode()
    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        if not self._samples:
            return
        waiting, self._masked = self._masked, None
        assert waiting is not None and waiting.plan.step == step and waiting.plan.masked is not None
        known, rest = (waiting.plan, waiting.logits, waiting.beside), waiting.rest
        if has_drafts(waiting.plan) or waiting.follow is not None:
            rest.set_result(self._verify(*known, masks, waiting.follow))
            return
        masked = waiting.plan.masked[waiting.plan.sample]
        places, words = self._staging.to_device(np.flatnonzero(masked)), self._staging.to_device(masks.words)
        rest.set_result(self._sample(*known, BatchMasks(masked, places, words)))

    def _launch_decodes(self, plan: BatchPlan, growth: Growth) -> InFlight:
        batch, slots = len(plan.rows), self._inputs.mirror.adapters[plan.rows]
        adapted = bool(slots.any())
        shared = not adapted and self._inputs.share(plan.common)
        few_keys = not (adapted or shared) and worth(batch, int(growth.lengths.sum()))
        graphs = self._few_keys_graphs if few_keys and self._has_few_keys_graphs else self._decode_graphs
        graphs = self._adapted_graphs if adapted else self._shared_graphs if shared else graphs
        captured = graphs.find(batch)
        size = batch if captured is None else captured[0]
        self._inputs.send_decode(plan, growth, size)
        sent = self._adapted.send(slots, size=size) if adapted else None
        if captured is None:
            hidden = self._decode_hidden(batch, few_keys, growth.context_lens, shared=shared, adapted=adapted)
        else:
            graph = captured[1]
            hidden = graph.forward.replay()[:batch]
            if graph.sample is not None and plan.masked is None and self._sampling.plain(plan.rows):
                tokens = self._staging.to_host(graph.sample.replay())
                return CudaStep(plan, self._clock.stop(), tokens, None)
        return self._finish(plan, hidden, NOTHING_BESIDE, None if sent is None else lambda: sent.tokens)

    def _launch_drafted(self, drafter: Drafter, plan: BatchPlan, layout: StepLayout, pooled: bool) -> InFlight:
        """A step beside a draft model, which guesses before the forward pass and follows once rows have sampled."""
        token_ids, chain = self._inputs.mixed_batch(layout)
        batch, drafts, to_device = chain, None, self._staging.to_device
        if has_drafts(plan):
            last = token_ids[to_device(layout.from_device.astype(np.int64))]
            drafts = drafter.guess(plan, layout, self._inputs.page_tables, last)
            token_ids.index_copy_(0, to_device(layout.draft_places), drafts.tokens)
            if drafts.parents is not None:
                batch = self._inputs.mirror.tree_batch(layout, drafts.parents, to_device)
        taps = drafter.taps()
        hidden = self._forward(token_ids, batch, tapped=taps, media=self._encoded(plan, layout))
        if drafts is not None:
            plan = with_drafts(plan, drafts)
            layout.token_ids[layout.draft_places] = plan.tokens[: len(drafts.tokens)]
        beside = self._beside(plan, layout, hidden, pooled)
        follow = partial(drafter.follow, plan, layout, chain, token_ids, hidden, taps)
        if not plan.sample.any():
            follow(NOTHING)
            return CudaStep(plan, self._clock.stop(), None, None, beside)
        asked = hidden.index_select(0, self._staging.to_device(sampled_tokens(plan, layout.query_starts)))
        return self._finish(plan, asked, beside, follow=follow)

    def _encoded(self, plan: BatchPlan, layout: StepLayout) -> MediaRows | None:
        """What stands in the place of tokens."""
        media = None if self._encoder is None else self._encoder.run(plan, layout)
        if self._encoder is not None and plan.encodes:
            self._clock.encoded(self._encoder.take_failed())
        return media

    def _beside(self, plan: BatchPlan, layout: StepLayout, hidden: torch.Tensor, pooled: bool) -> Beside:
        """What was asked for of the hidden states of all tokens: logprobs of prompts, and vectors."""
        scoring = (partial(logits_of, self._model, layout.adapters), self._staging.to_device)
        inputs = prompt_logprobs(plan, self._sampling, hidden, layout.query_starts, *scoring)
        return Beside(inputs, self._pooler.pool(plan, layout, hidden) if pooled else {})

    def _mixed_hidden(
        self, plan: BatchPlan, layout: StepLayout, pooled: bool
    ) -> tuple[torch.Tensor, Beside, AdaptedRows | None]:
        """The hidden states of the tokens that sample, what was asked for of others, and the adapters of the first."""
        media = self._encoded(plan, layout)
        wide = pooled or plan.input_logprobs or has_drafts(plan)  # of some rows more than one token is asked for
        wide = wide or (self._mixed.media is None and (media is not None or plan.positions is not None))
        adapted, ends = bool(layout.adapters.any()), sampled_tokens(plan, layout.query_starts)
        graphs = self._adapted_mixed_graphs if adapted else self._mixed_graphs
        captured = None if wide else graphs.find(len(layout.token_ids))
        if captured is not None:
            size, graph = captured
            self._copies.begin_step(by_layer=False)
            self._mixed.send(plan, layout, size, media)
            sent = self._adapted.send(layout.adapters, ends, size, self._mixed.room(size).rows) if adapted else None
            return graph.replay()[: int(plan.sample.sum())], NOTHING_BESIDE, None if sent is None else lambda: sent.ends
        both_ways = None if self._encoder is None else self._encoder.both_ways(plan, layout)
        token_ids, batch = self._inputs.mixed_batch(layout, both_ways)
        logits_indices = self._staging.to_device(ends)
        adapters = self._adapted.send(layout.adapters, ends) if adapted else None
        of_ends = None if adapters is None else lambda: adapters.ends
        if not ((pooled or plan.input_logprobs) and self._samples):
            hidden = self._forward(token_ids, batch, logits_indices, media=media, adapters=adapters)
            return hidden, NOTHING_BESIDE, of_ends
        hidden = self._forward(token_ids, batch, media=media, adapters=adapters)
        beside = self._beside(plan, layout, hidden, pooled)
        return hidden.index_select(0, logits_indices), beside, of_ends

    def _run_unusual(self) -> None:
        """A step of prompts of a length that nothing else begins with, kernel by kernel."""
        self._staging.next_step()
        tokens = min(UNUSUAL_TOKENS, self._limits.chunk_tokens)
        step = (self._model, self._attention, self._pool, self._limits)
        run_padding(*step, tokens)
        rows = tokens // SHORT_CHUNK
        if self._limits.shares_reads and rows > 1:
            run_padding(*step, rows * SHORT_CHUNK, rows)

    # Graphs: a step is first run on padding, so that every kernel is compiled and every buffer allocated --------------

    def _capture_decode(self, size: int, *, few_keys: bool, shared: bool = False, adapted: bool = False) -> DecodeGraph:
        self._inputs.pad_decode()
        if adapted:
            self._adapted.send(NO_ROWS, size=size)

        def forward() -> torch.Tensor:
            return self._keep(self._decode_hidden(size, few_keys, shared=shared, adapted=adapted))

        def sample() -> torch.Tensor:
            rows = (lambda: self._adapted.take(size).tokens) if adapted else None
            return self._sample_decodes(size, self._model.logits(self._hidden[:size], rows))

        forward()
        if self._samples:
            sample()
        torch.cuda.synchronize()
        captured = self._graph_memory.capture(forward)
        return DecodeGraph(captured, self._graph_memory.capture(sample) if self._samples else None)

    def _capture_mixed(self, size: int, adapted: bool = False) -> Captured[torch.Tensor]:
        self._staging.next_step()
        self._mixed.pad(size)
        rows = self._mixed.room(size).rows
        if adapted:
            self._adapted.send(NO_ROWS, size=size, ends_size=rows)

        def forward() -> torch.Tensor:
            token_ids, batch, ends, media = self._mixed.take(size)
            adapters = self._adapted.take(size, rows) if adapted else None
            if adapted and rows == size:  # adapters tell all tokens and the ends apart by their number
                return self._keep(self._forward(token_ids, batch, media=media, adapters=adapters).index_select(0, ends))
            return self._keep(self._forward(token_ids, batch, ends, media=media, adapters=adapters))

        forward()
        torch.cuda.synchronize()
        return self._graph_memory.capture(forward)

    def _keep(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same hidden states in the buffer that all graphs share: valid until the next graph is replayed."""
        return self._hidden[: len(hidden)].copy_(hidden)

    def _finish(
        self,
        plan: BatchPlan,
        hidden: torch.Tensor,
        beside: Beside,
        adapted: AdaptedRows | None = None,
        follow: Follow | None = None,
    ) -> InFlight:
        """Samples, at once or, where grammars have a say, when their masks have come."""
        if not self._samples or not plan.sample.any():
            return CudaStep(plan, self._clock.stop(), None, None, beside)
        logits = self._model.logits(hidden, adapted)
        if plan.masked is None:
            if has_drafts(plan) or follow is not None:
                return self._verify(plan, logits, beside, None, follow)
            return self._sample(plan, logits, beside)
        self._masked = MaskedStep(plan, logits, beside, follow)
        return self._masked

    def _sample(
        self, plan: BatchPlan, logits: torch.Tensor, beside: Beside, masks: BatchMasks | None = None
    ) -> CudaStep:
        """Samples, and sends the tokens on two ways: to the next step, and to the host."""
        numbers = plan.rows[plan.sample]
        rows = self._staging.to_device(numbers.astype(np.int64))
        sampled = sample_rows_on_device(self._sampling, logits, rows, numbers, masks=masks)
        self._inputs.advance(rows, sampled.tokens)
        specs = self._sampling.specs(numbers)
        outputs = None if specs is None else output_logprobs(logits, sampled.tokens, specs)
        tokens = self._staging.to_host(sampled.tokens.masked_fill(sampled.bad, -1))
        return CudaStep(plan, self._clock.stop(), tokens, outputs, beside)

    def _verify(
        self,
        plan: BatchPlan,
        logits: torch.Tensor,
        beside: Beside,
        masks: TokenMasks | None,
        follow: Follow | None = None,
    ) -> VerifiedStep:
        """Samples position by position, and reads of each how many drafts hold."""
        device = logits.device

        def draw(of_rows: torch.Tensor, rows: IntArray, of: BatchMasks | None) -> Drawn:
            if of is not None:
                of = BatchMasks(of.masked, of.places.to(device), of.words.to(device))
            on_device = torch.from_numpy(rows.astype(np.int64)).to(device)
            sampled = sample_rows_on_device(self._sampling, of_rows, on_device, rows, masks=of)
            return Drawn(sampled.tokens.cpu().numpy(), sampled.bad.cpu().numpy())

        def supplied() -> TokenMasks:
            assert masks is not None
            return masks

        verified, rows = sample_step(plan, logits, draw, supplied), plan.rows[plan.sample]
        self._drafted.got[rows] = verified.counts
        self._inputs.advance(*(torch.from_numpy(a.astype(np.int64)).to(device) for a in (rows, verified.last)))
        self._inputs.mirror.give_back(rows, verified.widths - verified.counts)
        self._states.settle(plan, verified.counts)
        if follow is not None:
            follow(verified)
        result = verified.result(plan, logits, self._sampling, *beside)
        return VerifiedStep(self._clock.stop(), result)

    def _sample_decodes(self, size: int, logits: torch.Tensor) -> torch.Tensor:
        """The tokens of the step in the persistent buffers, for rows without penalties, filters or logprobs; -1 for bad
        ones. Can be captured."""
        rows = self._inputs.decode_rows(size).long()
        tokens, bad = sample_rows(logits, rows, self._sampling.parameters, filtered=False)
        tokens = self._sampling.agree(tokens)
        self._inputs.advance(rows, tokens)
        return tokens.masked_fill_(bad, -1)

    def _decode_hidden(
        self, size: int, few_keys: bool, lens: IntArray | None = None, *, shared: bool = False, adapted: bool = False
    ) -> torch.Tensor:
        """Of the step in the persistent buffers. A graph is for any lengths: it is captured without them."""
        token_ids, batch = self._inputs.decode_batch(size, few_keys, lens, shared=shared)
        return self._forward(token_ids, batch, adapters=self._adapted.take(size) if adapted else None)

    def _forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        logits_indices: torch.Tensor | None = None,
        tapped: Tapped | None = None,
        media: MediaRows | None = None,
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        attention = self._attention if batch.both_ways is None else self._both_ways
        attention.prepare(batch)
        parts, wait_for = (batch, logits_indices, tapped, adapters, media), self._copies.wait_for
        return self._model.forward(token_ids, ForwardContext(attention, self._pool, *parts, wait_for=wait_for))
