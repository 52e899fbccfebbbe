"""Models that make drafts for another one, their target, from its hidden states: EAGLE heads and layers for further
tokens. They look at each token together with the target's hidden state before it, so they are one token ahead.

They have neither an embedding nor, most of them, a head: these are the target's.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from bough.attention.context import AdaptedRows, ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.attention import SelfAttention
from bough.layers.blocks import Block, PreNormBlock
from bough.layers.linear import ColumnLinear, Columns
from bough.layers.mlp import make_mlp
from bough.layers.norm import NO_NORM, Inputs, make_norm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot, slots_of
from bough.models.base import CausalLM
from bough.models.decoder import Decoder


class DraftModel(Protocol):
    """What a drafter asks of a model. `ahead`: it is given hidden states, and each token a place early."""

    config: ModelConfig
    ahead: bool

    def take_in(self, tapped: Sequence[torch.Tensor], ctx: ForwardContext) -> torch.Tensor:
        """What it reads of the target [tokens, hidden size each], in the form of its own hidden states."""
        ...

    def advance(self, token_ids: torch.Tensor, hidden: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """Its hidden states, which it takes in again for the tokens after these; stores keys and values."""
        ...

    def best(self, hidden: torch.Tensor, ctx: ForwardContext, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's tokens that follow most likely, and their scores: see `likeliest`."""
        ...


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many tokens of each line, and the logarithms of their probabilities; of one alone the score means nothing.
    [n, count] int64 and float"""
    if count == 1:
        return logits.argmax(1, keepdim=True), logits[:, :1]
    best = logits.float().log_softmax(1).nan_to_num(nan=float("-inf")).topk(count)
    return best.indices, best.values


class SmallerModel:
    """A language model of its own that knows the target's tokens."""

    ahead = False

    def __init__(self, model: CausalLM, vocab_size: int) -> None:
        self.config, self._model, self._vocab_size = model.config, model, vocab_size

    def take_in(self, tapped: Sequence[torch.Tensor], ctx: ForwardContext) -> torch.Tensor:
        raise NotImplementedError("it looks at tokens alone")

    def advance(self, token_ids: torch.Tensor, hidden: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        return self._model.forward(token_ids.clamp_max(self.config.vocab_size - 1), ctx)

    def best(self, hidden: torch.Tensor, ctx: ForwardContext, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return likeliest(self._model.logits(hidden)[:, : self._vocab_size], count)


class TargetReader:
    """What draft models share that read hidden states of the target."""

    ahead = True
    label_head = None

    def __init__(self, config: ModelConfig) -> None:
        assert config.draft is not None
        self.config, self.draft = config, config.draft
        self._target: Decoder | None = None

    def serve(self, target: Decoder) -> None:
        self._target = target

    def take_in(self, tapped: Sequence[torch.Tensor], ctx: ForwardContext) -> torch.Tensor:
        return tapped[0]

    def best(self, hidden: torch.Tensor, ctx: ForwardContext, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return likeliest(self.target.logits(hidden), count)

    @property
    def target(self) -> Decoder:
        assert self._target is not None
        return self._target

    def forward(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        raise NotImplementedError("a draft model is not served")

    def logits(self, hidden: torch.Tensor, adapted: AdaptedRows | None = None) -> torch.Tensor:
        raise NotImplementedError("a draft model is not served")


def _product(name: str, inputs: int, config: ModelConfig, bias: bool, placement: Placement) -> ColumnLinear:
    return ColumnLinear(inputs, (Columns(name, slice(0, config.hidden_size)),), bias, placement)


class EagleHead(TargetReader):
    """EAGLE 1 and 2: a product of embedding and hidden state, and layers of which the first has no norm before it.
    What comes out is taken for the target's next hidden state."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__(config)
        self._product = _product("fc", 2 * config.hidden_size, config, self.draft.bias, placement)
        self._blocks = [PreNormBlock(config, layer, placement) for layer in range(config.num_layers)]
        self._blocks[0].input_layernorm = NO_NORM

    def advance(self, token_ids: torch.Tensor, hidden: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        assert hidden is not None
        x, residual = self._product(torch.cat((self.target.embed(token_ids, ctx), hidden), dim=-1), ctx), None
        for block in self._blocks:
            x, residual = block(x, residual, ctx)
        return x if residual is None else x + residual

    def slots(self) -> Iterator[WeightSlot]:
        yield from self._product.slots("")
        for layer, block in enumerate(self._blocks):
            yield from block.slots(f"layers.{layer}.")


class Eagle3Head(TargetReader):
    """EAGLE-3: a product takes the target's hidden states of several layers in; one layer attends with embedding and
    hidden state side by side. It has a head of its own, over a choice of tokens."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__(config)
        width, vocab_size = config.hidden_size, self.draft.vocab_size or config.vocab_size
        self._product = _product("fc", max(1, len(self.draft.taps)) * width, config, self.draft.bias, placement)
        self._norms = {
            name: make_norm(config, placement)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        }
        self._attention = SelfAttention(config, 0, placement, 2 * width)
        self._mlp = make_mlp(config, 0, placement)
        self._norm = make_norm(config, placement)
        self._head = placement.make_table(vocab_size, width, placement)
        self._offsets: torch.Tensor | None = None  # from its tokens to the target's
        if vocab_size != config.vocab_size:
            self._offsets = torch.zeros(vocab_size, dtype=torch.int64, device=placement.device)

    def take_in(self, tapped: Sequence[torch.Tensor], ctx: ForwardContext) -> torch.Tensor:
        return self._product(torch.cat(list(tapped), dim=-1), ctx)

    def advance(self, token_ids: torch.Tensor, hidden: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        embedded = self._norms["input_layernorm"](self.target.embed(token_ids, ctx), None, ctx)[0]
        assert hidden is not None
        both = torch.cat((embedded, self._norms["hidden_norm"](hidden, None, ctx)[0]), dim=-1)
        x, _ = self._attention(Inputs(both), ctx)
        x, residual = self._mlp(Inputs(x, hidden, self._norms["post_attention_layernorm"]), ctx)
        return x + residual

    def best(self, hidden: torch.Tensor, ctx: ForwardContext, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        found, scores = likeliest(self._head.logits(self._norm(hidden, None, ctx)[0]), count)
        return found if self._offsets is None else found + self._offsets[found], scores

    def slots(self) -> Iterator[WeightSlot]:
        yield from self._product.slots("")
        yield from slots_of("midlayer.", **self._norms, self_attn=self._attention, mlp=self._mlp)
        yield from slots_of("", norm=self._norm, lm_head=self._head)
        if self._offsets is not None:
            yield WeightSlot("d2t", self._offsets)


class NextTokenLayer(TargetReader):
    """A layer behind the target's last that predicts the token after the next (DeepSeek V3, GLM 4.5, Qwen3-Next): a
    product of embedding and hidden state, each normalised, and a layer like the target's. What comes out is normalised.
    """

    def __init__(self, config: ModelConfig, placement: Placement, block: Block) -> None:
        super().__init__(config)
        self._embedding_norm, self._hidden_norm, self._norm = (make_norm(config, placement) for _ in range(3))
        self._product = _product("eh_proj", 2 * config.hidden_size, config, False, placement)
        self._block = block

    def advance(self, token_ids: torch.Tensor, hidden: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        assert hidden is not None
        embedded = self._embedding_norm(self.target.embed(token_ids, ctx), None, ctx)[0]
        both = torch.cat((embedded, self._hidden_norm(hidden, None, ctx)[0]), dim=-1)
        x, residual = self._block(self._product(both, ctx), None, ctx)
        return self._norm(x, residual, ctx)[0]

    def slots(self) -> Iterator[WeightSlot]:
        prefix = f"model.layers.{self.draft.layer}."
        yield from slots_of(prefix, enorm=self._embedding_norm, hnorm=self._hidden_norm)
        yield from self._product.slots(prefix)
        yield from self._block.slots(prefix)
        yield from slots_of(f"{prefix}shared_head.", norm=self._norm)
