"""The executor for GPUs: everything is queued, nothing is waited for.

`launch` copies a step's few integers to the device, queues the forward pass (a captured graph, or kernel by kernel
where there is none), the sampling and the copy of the tokens back to pinned memory, and returns. Sampled tokens stay on
the device as the input of the next step. The order of things on the stream is described in `cuda_inputs`.

A step with masked rows is queued in two parts: `launch` stops at the logits, and `supply_masks` queues the rest. By
then the device is at work on the forward pass, so it hardly ever waits for a grammar.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bough.attention.base import AttentionBackend
from bough.attention.batch import AttentionBatch
from bough.attention.context import ForwardContext
from bough.core.control import Command, CommandResult, CopyPagesIn, CopyPagesOut, Ticket
from bough.core.plan import (
    BatchPlan,
    InFlight,
    InputLogprobs,
    IntArray,
    Limits,
    LogprobSpec,
    TokenMasks,
)
from bough.executor.control import ModelControl
from bough.executor.cuda_copies import PageCopies
from bough.executor.cuda_inputs import CudaInputs
from bough.executor.cuda_steps import CudaStep, MaskedStep
from bough.executor.device_clock import DeviceClock
from bough.executor.graphs import Captured, GraphSizes, Ladder, Pauses, cut_sizes, replay_s, waits_for_host
from bough.executor.layout import Growth, StepLayout, prompt_targets, sampled_tokens
from bough.executor.mixed_inputs import MixedInputs
from bough.executor.padding import padding_batch
from bough.executor.staging import Staging
from bough.executor.threaded import Running
from bough.executor.warm_up import WarmUp, rare_pieces
from bough.executor.weights import WeightStore
from bough.kernels.projected_decode.triton import worth
from bough.kernels.sampling.triton import sample_rows
from bough.kernels.tuned_linear.products import products_on
from bough.memory.pools.kv_pool import KVPool
from bough.models.base import CausalLM
from bough.sampling.logprobs import Scores, output_logprobs, score_inputs
from bough.sampling.masks import BatchMasks
from bough.sampling.sampler import sample_rows_on_device
from bough.sampling.state import SamplingState

UNUSUAL_TOKENS = 1_499  # neither few nor a whole chunk, nor a multiple of anything
TUNING_TOKENS = 32  # of a forward pass in which every product is left to the library


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A decode step: the forward pass, and the sampling of rows that ask for nothing special."""

    forward: Captured[torch.Tensor]
    sample: Captured[torch.Tensor]

    def replay(self) -> None:
        """All of it, to see how long it takes."""
        self.forward.replay()
        self.sample.replay()


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
        staging: Staging,
        sampling: SamplingState,
        *,
        graphs: GraphSizes,
        dtype: torch.dtype,
        weights: WeightStore | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._limits = limits
        self._inputs = inputs
        self._mixed = mixed
        self._staging = staging
        self._sampling = sampling
        self._clock = DeviceClock()
        pauses = Pauses()
        self._few_keys_graphs = Ladder(
            "short decode", graphs.few_keys, partial(self._capture_decode, few_keys=True), pauses, _time_decode
        )
        self._decode_graphs = Ladder(
            "decode", graphs.decode, partial(self._capture_decode, few_keys=False), pauses, _time_decode
        )
        self._mixed_graphs = Ladder("mixed", graphs.mixed, self._capture_mixed, pauses, self._time_mixed)
        self._ladders = (self._few_keys_graphs, self._decode_graphs, self._mixed_graphs)  # as they are climbed
        self._has_few_keys_graphs = bool(graphs.few_keys)
        self._graph_memory = torch.cuda.graph_pool_handle()
        device = inputs.page_table.device
        pieces = rare_pieces(limits.vocab_size, dtype, device)
        self._warm_up = WarmUp(pieces, self._run_unusual, lambda: torch.cuda.set_device(device))
        self._products = products_on(device)
        self._prepared = not graphs.mixed  # it is known which products to measure, or nothing is
        self._masked: MaskedStep | None = None  # the newest step, while it waits for its masks
        self._control = ModelControl(weights, pool, drop=self._drop_graphs)
        self._copies: PageCopies | None = None  # made when pages are copied for the first time
        # Reading weights takes long, and the scheduler answers meanwhile.
        self._commands = ThreadPoolExecutor(1, "commands", initializer=lambda: torch.cuda.set_device(device))
        self._command: Future[CommandResult] | None = None  # the last one

    def limits(self) -> Limits:
        return self._limits

    def control(self, command: Command) -> Ticket:
        """Copies are queued like steps; whatever else changes weights or memory is done while nothing is in flight, and
        later steps wait for it."""
        self._finish_command()
        if isinstance(command, CopyPagesOut | CopyPagesIn):
            self._copies = self._copies or PageCopies(self._pool, self._inputs.page_table.device)
            return self._copies.start(command)
        torch.cuda.synchronize()
        self._command = self._commands.submit(self._control.run, command)
        return Running(self._command)

    def _finish_command(self) -> None:
        if self._command is not None:
            wait([self._command])
            self._command = None

    def _drop_graphs(self) -> None:
        """They hold addresses of weights and pages. They are captured again as after a start."""
        for ladder in self._ladders:
            ladder.clear()
        self._graph_memory = torch.cuda.graph_pool_handle()

    def close(self) -> None:
        self._warm_up.close()
        self._commands.shutdown()
        torch.cuda.synchronize()

    @torch.inference_mode()
    def idle(self) -> bool:
        """Uses a quiet moment to have rare kernels compiled, to measure a product, or to capture one graph, which keeps
        the algorithms that it was captured with; False when there is nothing left to do."""
        self._finish_command()
        if self._control.asleep:
            return False
        if self._warm_up.advance():
            return True
        if not self._prepared:
            self._prepared = True
            self._staging.next_step()
            tokens = min(TUNING_TOKENS, self._mixed.largest)
            self._mixed.pad(tokens)
            chunk, cut = self._limits.chunk_tokens, cut_sizes(self._limits)
            self._products.prepare(chunk, cut, lambda: self._captured_hidden(tokens))
            return True
        if self._products.tune():
            for ladder in self._ladders:
                ladder.outdate(self._products.serves)
            return True
        return any(ladder.capture_next() for ladder in self._ladders)

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> InFlight:
        self._finish_command()
        self._clock.start()
        self._staging.next_step()
        self._sampling.setup(plan.setups)
        growth = self._inputs.apply(plan)
        if not len(plan.tokens):
            return self._launch_decodes(plan, growth)
        return self._launch_mixed(plan, self._inputs.lay_out(plan, growth))

    @torch.inference_mode()
    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        waiting, self._masked = self._masked, None
        assert waiting is not None and waiting.plan.step == step and waiting.plan.masked is not None
        masked = waiting.plan.masked[waiting.plan.sample]
        places, words = self._staging.to_device(np.flatnonzero(masked)), self._staging.to_device(masks.words)
        batch = BatchMasks(masked, places, words)
        waiting.rest = self._sample(waiting.plan, waiting.logits, waiting.rows, waiting.input_logprobs, batch)

    def _launch_decodes(self, plan: BatchPlan, growth: Growth) -> InFlight:
        batch = len(plan.rows)
        few_keys = worth(batch, int(growth.lengths.sum()))
        ladder = self._few_keys_graphs if few_keys and self._has_few_keys_graphs else self._decode_graphs
        captured = ladder.find(batch)
        if captured is None:
            self._inputs.send_decode(plan, growth, batch)
            logits = self._decode_logits(batch, few_keys, growth.context_lens)
        else:
            size, graph = captured
            self._inputs.send_decode(plan, growth, size)
            logits = graph.forward.replay()
            if plan.masked is None and self._sampling.plain(plan.rows):
                tokens = self._staging.to_host(graph.sample.replay())
                return CudaStep(plan, self._clock.stop(), tokens, None, {})
        return self._finish(plan, logits[:batch], self._inputs.decode_rows(batch), {})

    def _launch_mixed(self, plan: BatchPlan, layout: StepLayout) -> InFlight:
        hidden, inputs = self._mixed_hidden(plan, layout)
        if not plan.sample.any():
            return CudaStep(plan, self._clock.stop(), None, None, inputs)
        rows = self._staging.to_device(plan.rows[plan.sample])
        return self._finish(plan, self._model.logits(hidden), rows, inputs)

    def _mixed_hidden(self, plan: BatchPlan, layout: StepLayout) -> tuple[torch.Tensor, dict[int, Scores]]:
        """The hidden states of the tokens that sample, and the logprobs of prompt tokens that were asked for."""
        captured = None if plan.input_logprobs else self._mixed_graphs.find(len(layout.token_ids))
        if captured is not None:
            size, graph = captured
            self._mixed.send(plan, layout, size)
            return graph.replay()[: int(plan.sample.sum())], {}
        token_ids, batch = self._inputs.mixed_batch(layout)
        wanted = self._staging.to_device(sampled_tokens(plan, layout.query_starts))
        if not plan.input_logprobs:
            return self._forward(token_ids, batch, wanted), {}
        hidden = self._forward(token_ids, batch)
        inputs = {w.index: self._input_logprobs(plan, w, hidden, layout) for w in plan.input_logprobs}
        return hidden.index_select(0, wanted), inputs

    def _run_unusual(self) -> None:
        """A step of prompts of a length that nothing else begins with, kernel by kernel."""
        self._staging.next_step()
        limits, device = self._limits, self._inputs.page_table.device
        tokens = min(UNUSUAL_TOKENS, limits.chunk_tokens)
        batch = padding_batch(tokens, limits.context_length, limits.page_size, device)
        self._forward(torch.zeros_like(batch.positions), batch)

    # Graphs: a step is first run on padding, so that every kernel is compiled and every buffer allocated --------------

    def _capture_decode(self, size: int, *, few_keys: bool) -> DecodeGraph:
        self._inputs.pad_decode()
        self._sample_decodes(size, self._decode_logits(size, few_keys))
        torch.cuda.synchronize()
        forward = Captured(lambda: self._decode_logits(size, few_keys), self._graph_memory)
        logits = forward.replay()
        return DecodeGraph(forward, Captured(lambda: self._sample_decodes(size, logits), self._graph_memory))

    def _capture_mixed(self, size: int) -> Captured[torch.Tensor] | None:
        self._staging.next_step()
        self._mixed.pad(size)
        self._captured_hidden(size)  # compiles
        if not waits_for_host(size, lambda: self._captured_hidden(size)):
            return None
        return Captured(lambda: self._captured_hidden(size), self._graph_memory)

    def _time_mixed(self, size: int, graph: Captured[torch.Tensor]) -> float:
        """Where the fields of a step lie depends on its size: each graph needs padding of its own, or it would read
        another's as slots and rows, and write over the cache."""
        self._mixed.pad(size)
        return replay_s(graph.replay)

    def _captured_hidden(self, size: int) -> torch.Tensor:
        """The hidden states of the tokens that sample, of the step in the persistent buffers. Can be captured."""
        inputs = self._mixed.take(size)
        return self._forward(inputs.token_ids, inputs.batch, inputs.wanted)

    def _finish(self, plan: BatchPlan, logits: torch.Tensor, rows: torch.Tensor, inputs: dict[int, Scores]) -> InFlight:
        """Samples, at once or, where grammars have a say, when their masks have come."""
        if plan.masked is None:
            return self._sample(plan, logits, rows, inputs)
        self._masked = MaskedStep(plan, logits, rows, inputs)
        return self._masked

    def _sample(
        self,
        plan: BatchPlan,
        logits: torch.Tensor,
        rows: torch.Tensor,
        inputs: dict[int, Scores],
        masks: BatchMasks | None = None,
    ) -> CudaStep:
        """Samples, and sends the tokens on two ways: to the next step, and to the host."""
        numbers = plan.rows[plan.sample]
        rows = rows.long()
        sampled = sample_rows_on_device(self._sampling, logits, rows, numbers, masks=masks)
        self._inputs.advance(rows, sampled.tokens)
        specs = self._sampling.specs(numbers)
        outputs = None if specs is None else output_logprobs(logits, sampled.tokens, specs).fetch()
        tokens = self._staging.to_host(sampled.tokens.masked_fill(sampled.bad, -1))
        return CudaStep(plan, self._clock.stop(), tokens, outputs, inputs)

    def _sample_decodes(self, size: int, logits: torch.Tensor) -> torch.Tensor:
        """The tokens of the step in the persistent buffers, for rows without penalties, filters or logprobs; -1 for bad
        ones. Can be captured."""
        rows = self._inputs.decode_rows(size).long()
        tokens, bad = sample_rows(logits, rows, self._sampling.parameters, filtered=False)
        self._inputs.advance(rows, tokens)
        return tokens.masked_fill_(bad, -1)

    def _decode_logits(self, size: int, few_keys: bool, context_lens: IntArray | None = None) -> torch.Tensor:
        """Of the step in the persistent buffers. A graph is for any lengths: it is captured without them."""
        token_ids, batch = self._inputs.decode_batch(size, few_keys, context_lens)
        return self._model.logits(self._forward(token_ids, batch))

    def _forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._attention.prepare(batch)
        context = ForwardContext(self._attention, self._pool, batch, wanted)
        return self._model.forward(token_ids, batch.positions, context)

    def _input_logprobs(self, plan: BatchPlan, want: InputLogprobs, hidden: torch.Tensor, layout: StepLayout) -> Scores:
        first = int(layout.query_starts[want.index]) + want.first
        targets = self._staging.to_device(prompt_targets(plan, want))
        spec = self._sampling.logprob_specs[int(plan.rows[want.index])] or LogprobSpec()
        return score_inputs(self._model.logits, hidden[first : first + want.count], targets, spec).fetch()


def _time_decode(size: int, graph: DecodeGraph) -> float:
    """Whatever is in the persistent buffers: padding, while graphs are captured."""
    return replay_s(graph.replay)
