"""How much memory a step and the KV cache take: arithmetic over what was measured and the shape of the model.

The forward pass is measured. What only rare requests need (penalties, biases, logprobs) is counted for the worst case,
in which every row asks for it, so that no request finds the device full.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bough.core.errors import ResourceError
from bough.core.model_config import ModelConfig
from bough.core.sampling_params import MAX_LOGPROBS
from bough.core.settings import MemorySettings
from bough.distributed.topology import ONE_RANK, Topology
from bough.sampling.logprobs import INPUT_BLOCK

CPU_POOL_SHARE = 0.25  # of the free memory: several engines live side by side on one machine
CPU_POOL_CONTEXTS = 32
HEARING_ROWS = 32  # recordings at a time: each holds much, and none is faster for company
GPU_FRACTION = 0.9
GPU_ROWS = 512
GPU_CHUNK_TOKENS = 8192
MOE_CHUNK_TOKENS = 16384  # of which each of many experts gets rows enough for whole tiles
STEP_WIDTHS = 24  # times the hidden size, that each token of a step takes on a GPU, where that is not measured
ROW_STATES = 2  # recurrent states for each row: its own, and one that is kept for prefixes to be reused
MOST_TOKENS = 1 << 22  # of full attention, where no layer has it: page numbers alone take memory then


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a token takes in the layers of full attention and in those with a window, and how many tokens the latter
    keep when the former keep `tokens`."""

    full_bytes: int
    window_bytes: int = 0
    ratio: float = 0.0
    least_window: int = 0  # tokens with which one row can go on
    most_window: int = 0  # tokens with which all rows can, and as many prefixes be reused
    state_bytes: int = 0  # of one recurrent state, over all layers
    states: int = 0

    @staticmethod
    def of(
        config: ModelConfig,
        bytes_per_token: tuple[int, ...],
        settings: MemorySettings,
        rows: int,
        chunk_tokens: int,
        topology: Topology = ONE_RANK,
    ) -> CacheShape:
        states = topology.states_of(config)
        if states is not None:
            others = CacheShape.of(replace(config, recurrent=None), bytes_per_token, settings, rows, chunk_tokens)
            return replace(others, state_bytes=states.page_bytes, states=ROW_STATES * rows)
        if len(bytes_per_token) == 1:
            return CacheShape(bytes_per_token[0])
        full, window = bytes_per_token
        row = config.kv_groups[1].row_pages(settings.page_size) * settings.page_size
        chunk = chunk_tokens + settings.page_size
        # A prefix can be reused while the window before its end is cached: as many windows for those as for rows.
        return CacheShape(full, window, settings.swa_full_tokens_ratio, row + chunk, 2 * rows * row + chunk)

    def window_tokens(self, tokens: int) -> int:
        return max(self.least_window, min(math.ceil(tokens * self.ratio), self.most_window))

    def nbytes(self, tokens: int) -> int:
        states = self.states * self.state_bytes
        return tokens * self.full_bytes + self.window_tokens(tokens) * self.window_bytes + states

    def fitting(self, nbytes: int) -> int:
        """The most tokens that fit, 0 if none do."""
        most = max(nbytes, 0) // self.full_bytes if self.full_bytes else MOST_TOKENS
        return max(0, bisect_right(range(most + 1), nbytes, key=self.nbytes) - 1)

    def page_bytes(self, page_size: int) -> tuple[int, ...]:
        """What a page of each KV group takes."""
        windows, states = (self.window_bytes * page_size,), (self.state_bytes,)
        return (self.full_bytes * page_size, *windows * bool(self.least_window), *states * bool(self.states))


@dataclass(frozen=True, slots=True)
class CacheSize:
    """In pages of each KV group, with the reason for the start log."""

    pages: tuple[int, ...]
    note: str

    def shared(self, minimum: Callable[[Sequence[int]], tuple[int, ...]]) -> CacheSize:
        """What all ranks have room for: `minimum` tells the least of each number."""
        pages = minimum(self.pages)
        note = self.note if pages == self.pages else f"{self.note}; all ranks have room for {pages[0]} pages"
        return CacheSize(pages, note)

    @staticmethod
    def of(shape: CacheShape, tokens: int, page_size: int, why: str) -> CacheSize:
        tokens = tokens // page_size * page_size
        note = f"KV cache: {tokens} tokens ({gib(shape.nbytes(tokens))}), from {why}"
        pages = [tokens // page_size]
        if shape.least_window:  # a stage of a pipeline may have no such layer
            window = shape.window_tokens(tokens)
            note += f"; layers with a sliding window keep {window}"
            pages.append(-(-window // page_size))
        if shape.states:
            note += f"; recurrent layers have {shape.states} states ({gib(shape.states * shape.state_bytes)})"
            pages.append(shape.states)
        return CacheSize(tuple(pages), note)


def default_rows(config: ModelConfig, most: int, cache_bytes: int) -> int:
    """Requests at a time, where the user does not say: of recurrent models so many that their states leave half of the
    cache's memory to attention."""
    if config.speech is not None:
        heard = 2 * 4 * config.num_layers * config.speech.positions * config.hidden_size  # keys and values of a row
        return max(1, min(most, HEARING_ROWS, cache_bytes // heard))
    if config.states is None:
        return most
    return max(1, min(most, cache_bytes // (2 * ROW_STATES * config.states.page_bytes)))


def default_gpu_chunk(config: ModelConfig) -> int:
    """Prompt tokens of a step on a GPU, where the user does not say."""
    return min(GPU_CHUNK_TOKENS, config.context_length) if config.moe is None else MOE_CHUNK_TOKENS


def size_cpu_cache(
    settings: MemorySettings, *, free_bytes: int, weight_bytes: int, shape: CacheShape, context_length: int
) -> CacheSize:
    """The smaller of a share of the free memory and what 32 full contexts need, unless the user says otherwise.

    `free_bytes` is what is free once the weights are loaded.
    """
    size = settings.page_size
    if settings.max_total_tokens is not None:
        tokens, why = settings.max_total_tokens, "--max-total-tokens"
        needed = shape.nbytes(tokens)
        if needed > free_bytes:
            raise ResourceError(
                f"--max-total-tokens {tokens} needs {gib(needed)} for the KV cache, but only {gib(free_bytes)} are "
                f"free; set it to {shape.fitting(free_bytes) // size * size} or less."
            )
    elif settings.mem_fraction_static is not None:
        budget = int((free_bytes + weight_bytes) * settings.mem_fraction_static) - weight_bytes
        tokens, why = shape.fitting(budget), f"--mem-fraction-static {settings.mem_fraction_static}"
        if tokens < size:
            raise ResourceError(
                f"--mem-fraction-static {settings.mem_fraction_static} leaves nothing for the KV cache: the weights "
                f"take {gib(weight_bytes)} of {gib(free_bytes + weight_bytes)}; raise it or set --max-total-tokens."
            )
    else:
        by_memory = shape.fitting(int(free_bytes * CPU_POOL_SHARE))
        by_context = CPU_POOL_CONTEXTS * context_length
        if by_memory < by_context:
            tokens, why = by_memory, f"a quarter of {gib(free_bytes)} free memory"
        else:
            tokens, why = by_context, f"{CPU_POOL_CONTEXTS} times the context of {context_length}"
    if tokens // size < 1 or tokens // size * size < 2:
        raise ResourceError(
            f"The KV cache would hold only {tokens} tokens ({gib(free_bytes)} are free, {max(size, 2)} tokens take "
            f"{shape.nbytes(max(size, 2))} bytes); free some memory, or set --max-total-tokens, --mem-fraction-static "
            "or, for the states of recurrent layers, --max-running-requests."
        )
    return CacheSize.of(shape, tokens, size, why)


def size_gpu_cache(
    settings: MemorySettings,
    *,
    free_bytes: int,
    total_bytes: int,
    activation_bytes: int,
    shape: CacheShape,
    graph_bytes: int = 0,
) -> CacheSize:
    """What `--mem-fraction-static` of the device leaves after the weights; the rest is for the largest step, for graphs
    and for what libraries take by themselves, and never less than what these need. `free_bytes` is what is free once
    the weights are loaded."""
    size = settings.page_size
    fraction = GPU_FRACTION if settings.mem_fraction_static is None else settings.mem_fraction_static
    usable = free_bytes - activation_bytes - graph_bytes
    budget = min(usable, free_bytes - int(total_bytes * (1.0 - fraction)))
    fitting = shape.fitting(budget) // size * size
    tokens, why = fitting, f"{fraction:.0%} of {gib(total_bytes)} less weights"
    if budget == usable:
        why = f"what weights, a step of {gib(activation_bytes)} and graphs of {gib(graph_bytes)} leave"
    if settings.max_total_tokens is not None:
        tokens, why = settings.max_total_tokens // size * size, "--max-total-tokens"
        if shape.nbytes(tokens) > usable:
            text = f"--max-total-tokens {settings.max_total_tokens} needs {gib(shape.nbytes(tokens))} for the KV cache"
            raise ResourceError(f"{text}, but only {gib(usable)} are left on the device; set it to {fitting} or less.")
    if tokens < max(size, 2):
        raise ResourceError(
            f"Nothing is left on the device for the KV cache ({gib(free_bytes)} free, a step needs "
            f"{gib(activation_bytes)}); raise --mem-fraction-static, or lower --chunked-prefill-size or "
            "--max-running-requests."
        )
    return CacheSize.of(shape, tokens, size, why)


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


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
    drafts: int = 0  # of all rows together

    def step_bytes(self, forward_bytes: int) -> int:
        """The most that a step needs at once, given what its forward pass was measured to need."""
        hidden = (self.rows + self.chunk_tokens) * self.hidden_size * self.itemsize
        return max(forward_bytes, hidden + self.sampling_bytes())

    def sampling_bytes(self) -> int:
        """Logits of all rows and drafts. On top, either a separate float32 row for each with the copy that a request's
        own code is given (filters take less), or what logprobs need once these are gone. Prompts are scored before,
        without the logits."""
        line = self.vocab_size * FLOAT_BYTES
        logits = (self.rows + self.drafts) * self.vocab_size * self.logit_itemsize
        return logits + max(2 * self.rows * line, self.scoring_bytes())

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
