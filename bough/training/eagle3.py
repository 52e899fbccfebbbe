"""Trains an EAGLE-3 draft head: one Llama layer that reads what the model knows, and guesses what it says next.

Beside the embedding of each token the layer gets the model's hidden states before three of its layers, and predicts the
token behind it. Further ahead it reads its own output in their place, in training too, so that it learns to go on from
its guesses. Its targets are the model's distributions, over the tokens that the model says most often.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from bough.core.errors import ModelError

DEPTH = 5  # tokens that it learns to guess, one behind the other
FADE = 0.8  # what the loss of each counts beside the one before: a guess is of use only if those before it hold
WARM_UP = 0.04  # of all steps, until the learning rate is whole
SHAPE = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim"]
SHAPE += ["rms_norm_eps", "max_position_embeddings", "rope_parameters", "bos_token_id", "eos_token_id"]
Kept = list[tuple[Tensor, Tensor]]  # keys and values


class Text(NamedTuple):
    ids: list[int]
    start: int  # before it stands what the model was asked


def load_model(folder: Path, gguf: Path | None, device: str) -> PreTrainedModel:
    """Whole, and in 16 bits on a GPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"dtype": torch.float32 if device == "cpu" else torch.bfloat16}
    if gguf is not None:
        options |= {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True)}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.to(device).requires_grad_(False).eval()


class Layer(nn.Module):
    """Keeps the keys and values of every guess ahead: a guess sees the text as far as its own place, and the guesses
    that led to it there."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, self._head_dim = config.hidden_size, config.head_dim
        norms = [LlamaRMSNorm(width, eps=config.rms_norm_eps) for _ in range(3)]
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms
        heads, groups = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        sizes = {"q": (2 * width, heads), "k": (2 * width, groups), "v": (2 * width, groups), "o": (heads, width)}
        self.self_attn = nn.ModuleDict({f"{n}_proj": nn.Linear(*size, bias=False) for n, size in sizes.items()})
        self.mlp = LlamaMLP(config)

    def forward(self, embedded: Tensor, hidden: Tensor, turn: tuple[Tensor, Tensor], kept: Kept) -> Tensor:
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        q, k, v = (
            self.self_attn[f"{name}_proj"](x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2) for name in "qkv"
        )
        q, k = apply_rotary_pos_emb(q, k, *turn)
        share, length = q.shape[1] // k.shape[1], x.shape[1]
        kept.append((k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)))
        (keys, values), *ahead = kept
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = [(q @ keys.transpose(2, 3)).masked_fill(later, -math.inf)]
        scores += [(q * key).sum(-1, keepdim=True) for key, _ in ahead]
        weights = (torch.cat(scores, -1).float() / math.sqrt(self._head_dim)).softmax(-1).to(v.dtype)
        seen = weights[..., :length] @ values
        for place, (_, value) in enumerate(ahead, length):
            seen = seen + weights[..., place : place + 1] * value
        hidden = hidden + self.self_attn["o_proj"](seen.transpose(1, 2).flatten(2))
        found: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return found


class Head(nn.Module):
    """Named as in published checkpoints. `d2t` is how far a token's id lies above its place among the head's own."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, model: PreTrainedModel, texts: Sequence[Text], vocabulary: int) -> None:
        super().__init__()
        theirs = model.config.get_text_config()
        self.layers = (2, theirs.num_hidden_layers // 2, theirs.num_hidden_layers - 3)  # as published
        if theirs.num_hidden_layers < 3:
            raise ModelError(f"A draft head reads three layers, and this model has {theirs.num_hidden_layers}.")
        shape = {name: value for name in SHAPE if (value := getattr(theirs, name, None)) is not None}
        self.config = LlamaConfig(**shape, num_hidden_layers=1, tie_word_embeddings=False)
        said = Counter(token for text in texts for token in text.ids[text.start :])
        said.update(range(self.config.vocab_size))  # where the model does not say so many
        ids, width = torch.tensor(sorted(token for token, _ in said.most_common(vocabulary))), self.config.hidden_size
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.isin(torch.arange(self.config.vocab_size), ids))
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer, self.norm = Layer(self.config), LlamaRMSNorm(width, eps=self.config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(ids), bias=False)
        self.lm_head.weight.data.copy_(model.get_output_embeddings().weight[ids.to(model.device)])
        self._turn = LlamaRotaryEmbedding(self.config)

    def forward(self, states: Tensor, embedded: Tensor) -> Iterator[Tensor]:
        """The logits of the first, second … guess at each place of texts, but for the last ones."""
        length, kept = states.shape[1] - DEPTH, Kept()
        hidden, places = self.fc(states[:, :length]), torch.arange(length, device=states.device)[None]
        for ahead in range(DEPTH):
            token = embedded[:, 1 + ahead : 1 + ahead + length]
            hidden = self.midlayer(token, hidden, self._turn(hidden, places + ahead), kept)
            yield self.lm_head(self.norm(hidden))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stated = self.config.to_diff_dict() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.d2t),
            "rope_theta": self.config.rope_parameters["rope_theta"],
            "torch_dtype": "bfloat16",
        }
        (folder / "config.json").write_text(json.dumps(stated, indent=2) + "\n")
        tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in self.state_dict().items()}
        save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, folder / "model.safetensors")


def train(
    model: PreTrainedModel, texts: Sequence[Text], *, vocabulary: int, steps: int, batch_size: int, rate: float
) -> tuple[Head, list[float]]:
    """The head, and the loss of the first guess with each step. Texts too short to learn from are passed over."""
    texts = [text for text in texts if len(text.ids) - text.start > DEPTH + 1]
    if not texts:
        raise ModelError(f"The model wrote no text of more than {DEPTH + 1} tokens; give other prompts.")
    head = Head(model, texts, vocabulary).to(model.device)
    learner = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    rates = torch.optim.lr_scheduler.OneCycleLR(learner, rate, steps + 1, pct_start=WARM_UP, cycle_momentum=False)
    order, firsts, tokens, began = list[int](), list[float](), 0, time.monotonic()
    for step in range(1, steps + 1):
        while len(order) < batch_size:
            order += torch.randperm(len(texts)).tolist()
        batch, order = [texts[i] for i in order[:batch_size]], order[batch_size:]
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            losses, right = _losses(head, model, batch)
        learner.zero_grad()
        torch.autograd.backward([FADE**i * loss for i, loss in enumerate(losses)])
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        learner.step()
        rates.step()
        tokens, firsts = tokens + sum(len(text.ids) for text in batch), [*firsts, losses[0].item()]
        if step % max(1, steps // 50) == 0:
            shares, speed = torch.stack(right).tolist(), tokens / (time.monotonic() - began)
            hold = (
                f"{' '.join(f'{share:.0%}' for share in shares)} of guesses hold: {1 + sum(shares):.2f} tokens a step"
            )
            print(f"step {step} of {steps}: loss {firsts[-1]:.3f}; {hold}; {speed:,.0f} tokens/s", flush=True)
    return head, firsts


def _losses(head: Head, model: PreTrainedModel, batch: Sequence[Text]) -> tuple[list[Tensor], list[Tensor]]:
    """Of each guess ahead: the cross-entropy with the model's distribution, and in how many places it and those before
    it are the model's best tokens."""
    longest = max(len(text.ids) for text in batch)
    ids = torch.tensor([text.ids + [0] * (longest - len(text.ids)) for text in batch], device=model.device)
    starts, ends = torch.tensor([(text.start - 1, len(text.ids)) for text in batch], device=model.device).T
    with torch.no_grad():
        found = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        states = torch.cat([found.hidden_states[layer] for layer in head.layers], -1)
        best, wanted = found.logits.argmax(-1), found.logits[..., head.t2d].float().softmax(-1)
        embedded, places = model.get_input_embeddings()(ids), torch.arange(longest, device=model.device)
        own = (places >= starts[:, None]) & (places < ends[:, None])
        del found
    losses, right = list[Tensor](), list[Tensor]()
    hold = own[:, 1 : 1 + longest - DEPTH]
    for ahead, logits in enumerate(head(states.float(), embedded.float()), 1):
        at = slice(ahead, ahead + longest - DEPTH)
        learnt = own[:, at] & head.t2d[best[:, at]]
        each = -(wanted[:, at] * logits.float().log_softmax(-1)).sum(-1)
        losses.append((each * learnt).sum() / learnt.sum().clamp(min=1))
        guess = logits.argmax(-1)
        hold = hold & own[:, at] & (guess + head.d2t[guess] == best[:, at])
        right.append(hold.sum() / own[:, 1 : 1 + longest - DEPTH].sum().clamp(min=1))
    return losses, right
