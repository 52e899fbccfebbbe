"""Draft models change how many steps an answer takes, and nothing of what it says; and what they guess is what the
published descriptions of their formats say."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from bough.core.errors import BoughError, SettingsError
from bough.core.plan import BatchPlan
from bough.core.pooling import ALL_STATES
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.executor.drafter import Drafter, Guessed
from bough.executor.load_draft import find_draft
from bough.executor.torch_executor import TorchExecutor
from bough.loader.config import read_config
from bough.loader.locate import locate
from bough.messages.requests import LogprobRequest
from bough.scheduler.draft_lengths import DraftLengths
from tests.fakes.grammars import EOS, FakeGrammars, grammar
from tests.fakes.scheduler_bench import Bench
from tests.parity.draft_models import HIDDEN, VOCAB, write_deepseek, write_eagle, write_eagle3, write_target

CPU: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch",
    "cpu_threads": 1,
    "max_total_tokens": 4096,
    "context_length": 256,
    "chunked_prefill_size": 16,
    "speculative_adaptive": False,
}
KINDS = ("itself", "smaller", "EAGLE", "EAGLE3", "NEXTN")
TREE = {"speculative_eagle_topk": 3, "speculative_num_steps": 4, "speculative_num_draft_tokens": 10}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    target = write_target(root / "target")
    return {
        "target": target,
        "itself": target,
        # Heads of another number and width than the target's.
        "smaller": write_target(root / "smaller", layers=2, seed=5, num_attention_heads=4, num_key_value_heads=2),
        "EAGLE": write_eagle(root / "eagle", target),
        "EAGLE3": write_eagle3(root / "eagle3"),
        "NEXTN": write_deepseek(root / "deepseek"),
    }


def flags_of(kind: str, folders: dict[str, Path]) -> tuple[Path, dict[str, Any]]:
    """The target of a draft model, and the flags that ask for it."""
    if kind == "NEXTN":
        return folders[kind], {"speculative_algorithm": "NEXTN"}
    algorithm = kind if kind.startswith("EAGLE") else "STANDALONE"
    path = str(folders[kind])
    return folders["target"], {"speculative_algorithm": algorithm, "speculative_draft_model_path": path}


@contextmanager
def serving(folder: Path, scheduler: dict[str, Any] | None = None, **flags: Any) -> Iterator[Bench]:
    executor: Any = build_executor(locate(str(folder)), Settings.from_flat({**CPU, **flags})).executor
    yield Bench(executor, eos_ids=(EOS,), grammars=FakeGrammars(), **scheduler or {})  # type: ignore[arg-type]
    executor.close()


def prompts(count: int, longest: int = 60) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(2, longest))] for _ in range(count)]


VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": LogprobRequest(start=0)},
    {"temperature": 0.0, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "min_new_tokens": 10},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "seed": 8, "logit_bias": {28: 2.0}},
    {"temperature": 0.0, "regex": grammar([[1, 2, 3], [4, 20, 3], [7, 9, 60]])},
    {"temperature": 0.0, "stop_token_ids": [5, 17, 40]},
    {"temperature": 0.0, "ignore_eos": True},
]


def served(bench: Bench) -> tuple[dict[int, list[int]], list[float], list[int]]:
    """A batch of 32, each going on in a second turn: what is said, with which logprobs, and what was cached."""
    for handle, prompt in enumerate(prompts(32)):
        bench.ask(handle, prompt, max_new_tokens=16, **VARIANTS[handle % len(VARIANTS)])
    bench.run()
    for handle, prompt in enumerate(prompts(32)):
        bench.ask(100 + handle, [*prompt, *bench.out.outputs[handle], 3, 4], max_new_tokens=8, **GREEDY)
    bench.run()
    scores = [score for handle in sorted(bench.out.scores) for score in bench.out.scores[handle]]
    return dict(bench.out.outputs), scores, [bench.out.started[100 + n].cached_tokens for n in range(32)]


@pytest.fixture(scope="module")
def without(folders: dict[str, Path]) -> Callable[[Path], Any]:
    @functools.cache
    def answers(folder: Path) -> Any:
        with serving(folder) as bench:
            return served(bench)

    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("EAGLE3", {}),
        ("smaller", {}),
        ("EAGLE3", TREE),
        ("itself", TREE),
        *(pytest.param(k, {}, marks=pytest.mark.long) for k in ("itself", "EAGLE", "NEXTN")),
        *(pytest.param(k, TREE, marks=pytest.mark.long) for k in ("smaller", "EAGLE", "NEXTN")),
    ],
)
def test_a_batch_says_what_it_says_without(
    kind: str, shape: dict[str, int], folders: dict[str, Path], without: Callable[[Path], Any]
) -> None:
    folder, flags = flags_of(kind, folders)
    with serving(folder, **flags, **shape) as bench:
        outputs, scores, cached = served(bench)
        drafting = bench.scheduler._planner.drafting
        expected, their_scores, their_cached = without(folder)
        assert outputs == expected
        assert scores == pytest.approx(their_scores, abs=1e-3)
        assert cached == their_cached and sum(cached) > 1000
        assert drafting.proposed > drafting.verified
        if kind == "itself":  # penalties, seeds and biases say other things than the draft model, which knows of none
            assert drafting.held > (0.2 if shape else 0.4) * drafting.proposed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EAGLE3", pytest.param("smaller", marks=pytest.mark.long)])
def test_a_batch_says_the_same_while_a_draft_model_sleeps_now_and_then(
    kind: str, folders: dict[str, Path], without: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some requests begin without it, steps leave it out, and those that decode lose it for good."""
    draw, undrafted, run = random.Random(3), list[bool](), TorchExecutor.run
    monkeypatch.setattr(DraftLengths, "knows_cost", lambda *_: draw.random() > 0.2)
    monkeypatch.setattr(DraftLengths, "resting", property(lambda _: draw.random() < 0.3))
    monkeypatch.setattr(DraftLengths, "_best", lambda _, rows, order: len(order) if draw.random() > 0.15 else 0)

    def watched(self: TorchExecutor, plan: BatchPlan, masks: Any) -> Any:
        undrafted.append(plan.undrafted)
        return run(self, plan, masks)

    monkeypatch.setattr(TorchExecutor, "run", watched)
    folder, flags = flags_of(kind, folders)
    with serving(folder, **flags, speculative_adaptive=True) as bench:
        outputs, scores, cached = served(bench)
        drafting = bench.scheduler._planner.drafting
    expected, their_scores, their_cached = without(folder)
    assert outputs == expected and cached == their_cached
    assert scores == pytest.approx(their_scores, abs=1e-3)
    assert drafting.proposed > 20 and 5 < sum(undrafted) < len(undrafted) - 5


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "page_size", "shape"), [("EAGLE3", 4, {}), ("smaller", 1, {}), ("itself", 4, TREE)])
def test_retraction_changes_nothing(kind: str, page_size: int, shape: dict[str, int], folders: dict[str, Path]) -> None:
    folder, flags = flags_of(kind, folders)
    found = []
    for more in ({}, {**flags, **shape}):
        few = {"max_total_tokens": 64, "page_size": page_size}
        with serving(folder, {"schedule_conservativeness": 0.01}, **few, **more) as bench:
            for handle, prompt in enumerate(prompts(3, longest=20)):
                bench.ask(handle, prompt, max_new_tokens=30, **GREEDY)
            bench.run()
            assert sum(bench.out.retractions.values()) > 0
            found.append(dict(bench.out.outputs))
    assert found[0] == found[1]


def test_a_target_as_its_own_draft_is_always_right(folders: dict[str, Path]) -> None:
    """After chunked prompts, cached prefixes and steps without drafts too."""
    folder, flags = flags_of("itself", folders)
    with serving(folder, **flags, speculative_num_steps=5) as bench:
        for handle, prompt in enumerate(prompts(3)):
            bench.ask(handle, prompt, max_new_tokens=30, **GREEDY)
            bench.ask(10 + handle, [*prompt, 1, 2], max_new_tokens=30, **GREEDY)
        bench.run()
        drafting = bench.scheduler._planner.drafting
        # Of 29 tokens after the first, six come of a step while there is room for as many.
        assert drafting.held == drafting.proposed and drafting.verified == 6 * -(-29 // 6)


@pytest.mark.parametrize(("kind", "shape"), [("itself", {}), ("EAGLE3", {}), ("itself", TREE), ("EAGLE3", TREE)])
def test_a_grammar_allows_what_it_does_without_drafts(
    kind: str, shape: dict[str, int], folders: dict[str, Path]
) -> None:
    folder, flags = flags_of(kind, folders)
    wide = [[byte for byte in range(64) if byte % 4 != place % 4] for place in range(30)]
    found = []
    for more in ({}, {**flags, **shape}):
        with serving(folder, {"disable_jump_forward": True}, **more) as bench:
            for handle, prompt in enumerate(prompts(4)):
                sampling = {"temperature": 0.0} if handle % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": 3}
                bench.ask(handle, prompt, max_new_tokens=40, regex=grammar(wide), **sampling)
            bench.run()
            found.append((dict(bench.out.outputs), dict(bench.out.ended)))
    assert found[0] == found[1]
    drafting = bench.scheduler._planner.drafting
    assert drafting.proposed > 2 * drafting.verified
    assert kind != "itself" or drafting.held > 0.3 * drafting.verified


def test_trees_hold_more_than_chains_of_their_depth_and_are_counted(folders: dict[str, Path]) -> None:
    """By a head that is seldom right: what it ranks second or third counts too."""
    folder, flags = flags_of("EAGLE", folders)
    held = []
    for shape in ({"speculative_num_steps": 2}, {**TREE, "speculative_num_steps": 2}):
        with serving(folder, **flags, **shape) as bench:
            for handle, prompt in enumerate(prompts(4)):
                bench.ask(handle, prompt, max_new_tokens=40, **GREEDY)
            bench.run()
            drafting = bench.scheduler._planner.drafting
            for drafts in bench.out.drafts.values():
                assert drafts is not None and len(drafts.held) <= 3
                assert 1 + sum((1 + n) * steps for n, steps in enumerate(drafts.held)) == 40
            held.append(drafting.held)
            assert drafting.verified + drafting.held == 4 * 39
            assert drafting.proposed == sum(drafts.proposed for drafts in bench.out.drafts.values() if drafts)
    assert held[1] > held[0]


def test_hidden_states_are_those_of_the_path_that_holds(folders: dict[str, Path]) -> None:
    folder, flags = flags_of("itself", folders)
    found = []
    for more in ({}, {**flags, **TREE}):
        with serving(folder, {"enable_return_hidden_states": True}, **more) as bench:
            for handle, prompt in enumerate(prompts(3)):
                bench.ask(handle, prompt, max_new_tokens=30, pooling=ALL_STATES, **GREEDY)
            bench.run()
            for handle, prompt in enumerate(prompts(3)):
                states = np.full((len(prompt) + 29, HIDDEN), np.nan, dtype=np.float32)
                for part in bench.out.states[handle]:
                    rows = np.frombuffer(part.values, dtype=np.float32).reshape(part.count, HIDDEN)
                    states[part.first : part.first + part.count] = rows
                found.append(states)
    assert bench.scheduler._planner.drafting.held > 0
    for without_drafts, with_trees in zip(found[:3], found[3:], strict=True):
        np.testing.assert_allclose(with_trees, without_drafts, atol=1e-4)


# ---- what draft models guess -----------------------------------------------------------------------------------------

Guess = tuple[int, list[int]]  # tokens in the cache, and the drafts behind them


def guesses(monkeypatch: pytest.MonkeyPatch, folder: Path, flags: dict[str, Any]) -> tuple[list[int], list[Guess]]:
    """One request's tokens, and all that was guessed for it."""
    found: list[Guess] = []
    guess = Drafter.guess

    def recorded(self: Drafter, plan: Any, layout: Any, *args: Any) -> Guessed:
        drafts = guess(self, plan, layout, *args)
        found.append((int(layout.context_lens[0]), drafts.tokens.tolist()))
        return drafts

    monkeypatch.setattr(Drafter, "guess", recorded)
    (prompt,) = prompts(1, longest=40)
    with serving(folder, **flags, speculative_num_steps=4) as bench:
        bench.ask(0, prompt, max_new_tokens=24, **GREEDY)
        bench.run()
        return [*prompt, *bench.out.outputs[0]], found


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def attend(x: torch.Tensor, w: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    """Two heads of 16, one of keys, rotated by halves."""
    count = len(x)
    angles = torch.arange(count)[:, None] / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1)[:, None] for f in (torch.cos, torch.sin))

    def heads(name: str) -> torch.Tensor:
        return F.linear(x, w[f"{prefix}self_attn.{name}_proj.weight"]).view(count, -1, 16)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat((-x[..., 8:], x[..., :8]), dim=-1) * sin

    q, k, v = rotated(heads("q")), rotated(heads("k")), heads("v")
    k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / 16**0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    return F.linear(attended, w[f"{prefix}self_attn.o_proj.weight"])


def mlp(x: torch.Tensor, w: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    gate, up, down = (w[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


# Takes embeddings and hidden states of a text; gives its own, and the best token behind it.
Head = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, int]]


def chain(head: Head, embed: Callable[[list[int]], torch.Tensor], hidden: torch.Tensor, tokens: list[int]) -> list[int]:
    """Four guesses behind `tokens`, each by all before it anew."""
    drafts: list[int] = []
    for _ in range(4):
        given, best = head(embed([*tokens[1:], *drafts]), hidden)
        drafts.append(best)
        hidden = torch.cat((hidden, given[-1:]))
    return drafts


def check_guesses(
    found: list[Guess], tokens: list[int], head: Head, model: Any, states: Callable[[Any], torch.Tensor]
) -> None:
    embed = lambda ids: model.get_input_embeddings()(torch.tensor(ids))  # noqa: E731
    assert len(found) > 4
    for known, drafts in found:
        out = model(torch.tensor([tokens[:known]]), output_hidden_states=True)
        assert drafts == chain(head, embed, states(out), tokens[: known + 1])[: len(drafts)]


@torch.inference_mode()
def test_trees_are_the_best_of_what_their_levels_give(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    """Each level's three likeliest paths go on with three tokens each; the nine likeliest of all paths are verified."""
    folder, flags = flags_of("smaller", folders)
    found: list[tuple[int, list[int], list[int]]] = []
    guess = Drafter.guess

    def recorded(self: Drafter, plan: Any, layout: Any, *args: Any) -> Guessed:
        drafts = guess(self, plan, layout, *args)
        assert drafts.parents is not None
        found.append((int(layout.context_lens[0]), drafts.tokens.tolist(), drafts.parents.tolist()))
        return drafts

    monkeypatch.setattr(Drafter, "guess", recorded)
    (prompt,) = prompts(1, longest=40)
    with serving(folder, **flags, **TREE) as bench:
        bench.ask(0, prompt, max_new_tokens=24, **GREEDY)
        bench.run()
        tokens = [*prompt, *bench.out.outputs[0]]
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folders["smaller"])
    assert len(found) > 4
    for known, drafts, parents in found:
        paths: dict[tuple[int, ...], float] = {(): 0.0}
        beams: list[tuple[int, ...]] = [()]
        for _ in range(4):
            further: dict[tuple[int, ...], float] = {}
            for beam in beams:
                logits = model(torch.tensor([[*tokens[: known + 1], *beam]])).logits[0, -1]
                for token in logits.topk(3).indices.tolist():
                    further[*beam, token] = paths[beam] + float(logits.log_softmax(0)[token])
            paths |= further
            beams = sorted(further, key=further.__getitem__, reverse=True)[:3]
        own: list[tuple[int, ...]] = [()]
        for token, parent in zip(drafts, parents, strict=True):
            own.append((*own[parent], token))
        assert own == sorted(paths, key=paths.__getitem__, reverse=True)[: len(own)]


@torch.inference_mode()
def test_eagle3_guesses_as_published(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    tokens, found = guesses(monkeypatch, *flags_of("EAGLE3", folders))
    w = load_file(folders["EAGLE3"] / "model.safetensors")

    def head(embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, int]:
        parts = rms(embedded, w["midlayer.input_layernorm.weight"]), rms(hidden, w["midlayer.hidden_norm.weight"])
        x = hidden + attend(torch.cat(parts, dim=-1), w, "midlayer.")
        x = x + mlp(rms(x, w["midlayer.post_attention_layernorm.weight"]), w, "midlayer.")
        best = int(F.linear(rms(x[-1], w["norm.weight"]), w["lm_head.weight"]).argmax())
        return x, best + int(w["d2t"][best])

    model: Any = transformers.LlamaForCausalLM.from_pretrained(folders["target"])
    layers = (2, 3, 3)  # of six: the third, the middle one, and the third from the end
    taken = lambda out: F.linear(torch.cat([out.hidden_states[i][0] for i in layers], dim=-1), w["fc.weight"])  # noqa: E731
    check_guesses(found, tokens, head, model, taken)


@torch.inference_mode()
def test_eagle_guesses_as_published(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    tokens, found = guesses(monkeypatch, *flags_of("EAGLE", folders))
    w = load_file(folders["EAGLE"] / "model.safetensors")
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folders["target"])

    def head(embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, int]:
        x = F.linear(torch.cat((embedded, hidden), dim=-1), w["fc.weight"], w["fc.bias"])
        x = x + attend(x, w, "layers.0.")
        x = x + mlp(rms(x, w["layers.0.post_attention_layernorm.weight"]), w, "layers.0.")
        return x, int(model.lm_head(x[-1]).argmax())

    check_guesses(found, tokens, head, model, lambda out: out.hidden_states[-1][0])


@pytest.mark.slow
@torch.inference_mode()
def test_a_layer_for_further_tokens_guesses_as_transformers_does(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    from transformers.modeling_layers import MtpModel

    tokens, found = guesses(monkeypatch, *flags_of("NEXTN", folders))
    model: Any = transformers.DeepseekV3ForCausalLM.from_pretrained(folders["NEXTN"], attn_implementation="eager")
    model.config.num_mtp_layers = 1
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]  # it knows the number of the real one
    layer: Any = MtpModel.from_pretrained(model)

    def head(embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, int]:
        places = torch.arange(1, len(hidden) + 1)[None]
        given = layer.forward_layer(0, hidden[None], places, None, inputs_embeds=embedded[None])[0]
        return given, int(model.lm_head(given[-1]).argmax())

    check_guesses(found, tokens, head, model, lambda out: out.hidden_states[-1][0])


# ---- what does not go together ---------------------------------------------------------------------------------------


def test_pages_move_with_those_of_the_draft(folders: dict[str, Path]) -> None:
    folder, flags = flags_of("smaller", folders)
    executor: Any = build_executor(locate(str(folder)), Settings.from_flat({**CPU, **flags, "page_size": 4})).executor
    limits, pool = executor.limits(), executor._inner._pool.groups[0]
    # Six layers with one head of 16 and two with two of 8, keys and values, in float32.
    assert limits.page_bytes == (pool.page_bytes,) == (4 * (6 * 16 + 2 * 2 * 8) * 2 * 4,)
    content = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, pool.page_bytes), dtype=np.uint8))
    pool.write_pages(torch.tensor([3, 9]), content)
    assert pool.read_pages(torch.tensor([9, 3])).equal(content.flip(0))
    executor.close()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"speculative_algorithm": "EAGLE3"}, "EAGLE3 needs --speculative-draft-model-path"),
        ({"speculative_algorithm": "NEXTN"}, "has no layer that predicts further tokens"),
        ({"speculative_algorithm": "EAGLE"}, "name an EAGLE head"),
        ({"speculative_algorithm": "NEXTN", "speculative_draft_model_path": "x"}, "model's own checkpoint"),
        ({"speculative_draft_model_path": "x"}, "needs --speculative-algorithm"),
        ({"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "EAGLE3"}, "is an EAGLE head"),
        ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "EAGLE"}, "algorithm EAGLE; use that"),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "EAGLE3"}, "algorithm EAGLE3; use that"),
        (
            {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "smaller"},
            "is no EAGLE head: .* STANDALONE",
        ),
        ({"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 2}, "needs a draft model"),
        ({"speculative_num_draft_tokens": 4}, "need --speculative-algorithm"),
        (
            {
                "speculative_algorithm": "STANDALONE",
                "speculative_draft_model_path": "smaller",
                "speculative_num_steps": 3,
                "speculative_num_draft_tokens": 8,
            },
            "or set it to 4",
        ),
        ({"speculative_algorithm": "STANDALONE", "simulate_tp": 2}, "does not go with"),
    ],
)
def test_what_cannot_be_is_refused(folders: dict[str, Path], flags: dict[str, Any], text: str) -> None:
    path = flags.get("speculative_draft_model_path")
    given = {**flags, "speculative_draft_model_path": str(folders.get(path, path))} if path else flags
    with pytest.raises(BoughError, match=text):
        build_executor(locate(str(folders["target"])), Settings.from_flat({**CPU, **given}))


def test_eagle_without_a_head_is_the_models_own_layer(folders: dict[str, Path]) -> None:
    """So SGLang's users ask for it; some name the model once more."""
    path, found = str(folders["NEXTN"]), []
    for named in ({}, {"speculative_draft_model_path": path}):
        for algorithm in ("NEXTN", "EAGLE"):
            settings = Settings.from_flat({"model_path": path, "speculative_algorithm": algorithm, **named})
            found.append(find_draft(settings, locate(path), read_config(locate(path))))
    assert found[0] is not None and all(each == found[0] for each in found)


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
def test_pipelines_have_no_drafts(folders: dict[str, Path], algorithm: str) -> None:
    files = locate(str(folders["target"]))
    settings = Settings.from_flat({"speculative_algorithm": algorithm, "pp_size": 2})
    with pytest.raises(SettingsError, match="--pp-size"):
        find_draft(settings, files, read_config(files))


def test_a_draft_model_is_not_served(folders: dict[str, Path]) -> None:
    with pytest.raises(SettingsError, match="makes drafts for another model"):
        build_executor(locate(str(folders["EAGLE3"])), Settings.from_flat(CPU))
