"""A draft head learns from a model, guesses as it will when it serves, and is written as others read it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bough.cli.main import main
from bough.core.errors import ModelError
from bough.training.eagle3 import DEPTH, Head, Text, load_model, train
from tests.fakes.checkpoints import write_checkpoint

VOCABULARY = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), 3, num_hidden_layers=6)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_model(folder, None, "cpu")


def texts(count: int = 4, length: int = 20) -> list[Text]:
    draw = torch.Generator().manual_seed(0)
    return [Text(torch.randint(0, 64, (length - i,), generator=draw).tolist(), 2 + i) for i in range(count)]


def test_the_loss_falls(model: PreTrainedModel) -> None:
    torch.manual_seed(0)
    _, losses = train(model, texts(), vocabulary=VOCABULARY, steps=12, batch_size=4, rate=5e-3)
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.3


def guess_in_turn(head: Head, states: Tensor, embedded: Tensor, place: int, depth: int) -> list[Tensor]:
    """As a server does: the text up to `place` in one step, then each guess behind the others, all in one row."""
    layer, config = head.midlayer, head.config
    hidden, tokens, logits = head.fc(states[: place + 1]), embedded[1 : place + 2], []
    for _ in range(depth):
        x = torch.cat([layer.input_layernorm(tokens), layer.hidden_norm(hidden)], -1)
        q, k, v = (layer.self_attn[f"{n}_proj"](x).view(1, len(x), -1, config.head_dim).transpose(1, 2) for n in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *head._turn(x, torch.arange(len(x))[None]))
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = hidden + layer.self_attn["o_proj"](seen.transpose(1, 2).flatten(2))[0]
        out = out + layer.mlp(layer.post_attention_layernorm(out))
        logits.append(head.lm_head(head.norm(out[-1])))
        # The states of the text stay the model's; of a guess, its own output is what the next one reads.
        hidden, tokens = torch.cat([hidden, out[-1:]]), embedded[1 : len(tokens) + 2]
    return logits


@torch.no_grad()
def test_it_trains_on_what_it_will_see(model: PreTrainedModel) -> None:
    """All places at once, against one place after the other."""
    torch.manual_seed(1)
    head, length = Head(model, texts(), VOCABULARY), 14
    states, embedded = torch.randn(1, length, 3 * 64), torch.randn(1, length, 64)
    at_once = list(head(states, embedded))
    for place in (0, 3, length - DEPTH - 1):
        for ours, theirs in zip(at_once, guess_in_turn(head, states[0], embedded[0], place, DEPTH), strict=True):
            assert torch.allclose(ours[0, place], theirs, atol=1e-4)


def test_the_checkpoint_has_the_published_names(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line, with texts that were kept: no engine is needed."""
    kept, out = tmp_path / "texts.jsonl", tmp_path / "head"
    kept.write_text("".join(json.dumps(text) + "\n" for text in texts()))

    monkeypatch.setattr("bough.launch.engine.Engine", lambda **settings: pytest.fail("an engine was started"))
    argv = ["train-draft", str(folder), "--output", str(out), "--texts", str(kept), "--steps", "2", "--device", "cpu"]
    assert main([*argv, "--batch-size", "2", "--draft-vocab-size", str(VOCABULARY)]) == 0
    stated, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert stated["architectures"] == ["LlamaForCausalLMEagle3"] and stated["draft_vocab_size"] == VOCABULARY
    width, heads, groups = 64, 4 * 16, 2 * 16
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (width, 3 * width),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * width),
        "midlayer.self_attn.k_proj.weight": (groups, 2 * width),
        "midlayer.self_attn.v_proj.weight": (groups, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, heads),
        "midlayer.mlp.gate_proj.weight": (64, width),
        "midlayer.mlp.up_proj.weight": (64, width),
        "midlayer.mlp.down_proj.weight": (width, 64),
        "norm.weight": (width,),
        "lm_head.weight": (VOCABULARY, width),
        "d2t": (VOCABULARY,),
        "t2d": (128,),
    }
    ids = tensors["d2t"] + torch.arange(VOCABULARY)
    assert ids.unique().tolist() == tensors["t2d"].nonzero().flatten().tolist()
    said = {token for text in texts() for token in text.ids[text.start :]}
    assert said <= set(ids.tolist())


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--length", "-3"], "--length must be at least 1"),
        (["--prompts", "/nowhere"], "Cannot read /nowhere"),
        (["--prompts", "/dev/null"], "/dev/null is empty; write a prompt on each line."),
        (["--output", "/dev/null"], "--output or --texts: [Errno 17] File exists: '/dev/null'."),
        (["--output", "/tmp", "--texts", "/dev/null/texts"], "--output or --texts: [Errno 17]"),
    ],
)
def test_what_makes_no_sense_is_refused(more: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train-draft", "--output", "x", *more]) == 2
    assert complaint in capsys.readouterr().err


def test_a_model_must_have_layers_to_read(tmp_path: Path) -> None:
    small = load_model(write_checkpoint(tmp_path / "small", 1, num_hidden_layers=2), None, "cpu")
    with pytest.raises(ModelError, match="three layers, and this model has 2"):
        train(small, texts(), vocabulary=8, steps=1, batch_size=1, rate=1e-3)
    with pytest.raises(ModelError, match="wrote no text"):
        train(small, texts(1, DEPTH + 2), vocabulary=8, steps=1, batch_size=1, rate=1e-3)


def test_what_the_command_asks_is_kept_with_what_the_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake engine says a text too short to learn from; what it was asked and said is kept all the same."""
    asked = []

    class Engine:
        class tokenizer:
            chat_template = None
            encode = staticmethod(lambda text: [len(word) for word in text.split()])

        def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
            asked.append((input_ids, sampling_params["max_new_tokens"]))
            return [{"output_ids": [7, 8]} for _ in input_ids]

    monkeypatch.setattr("bough.launch.engine.Engine", lambda **settings: nullcontext(Engine()))
    monkeypatch.chdir(tmp_path)
    prompts, kept = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    prompts.write_text("a bb\n\nccc\n")
    argv = ["train-draft", str(tmp_path), "--output", "x", "--prompts", str(prompts), "--texts", str(kept)]
    assert main([*argv, "--num-texts", "3", "--length", "9"]) == 1
    assert asked == [([[1, 2], [3], [1, 2]], 9)]
    assert [json.loads(line) for line in kept.read_text().splitlines()] == [
        [[1, 2, 7, 8], 2],
        [[3, 7, 8], 1],
        [[1, 2, 7, 8], 2],
    ]
