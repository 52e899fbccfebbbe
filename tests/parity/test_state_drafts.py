"""Drafts on models with recurrent layers: a state cannot go back, so it goes on by the tokens that hold alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from bough.core.errors import SettingsError
from bough.core.plan import IntArray
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.executor.drafter import Drafter, Guessed
from bough.loader.locate import locate
from bough.scheduler.ngram import NgramProposer
from bough.scheduler.ports import Proposer
from tests.fakes.known_answers import RightOrWrong
from tests.fakes.scheduler_bench import Bench
from tests.parity.draft_models import add_mtp
from tests.parity.test_families import VOCAB, make
from tests.parity.test_states import draw

NEW = 14
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": NEW}
FLAGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch",
    "cpu_threads": 1,
    "max_running_requests": 12,  # so that no state is evicted: which one would be depends on which request ends first
    "max_total_tokens": 2000,
    "context_length": 128,
    "chunked_prefill_size": 16,
    "speculative_adaptive": False,
}
QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5_moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By family: a folder, and what transformers make of it."""
    made: dict[str, tuple[Path, transformers.PreTrainedModel]] = {}

    def find(family: str) -> tuple[Path, transformers.PreTrainedModel]:
        if family not in made:
            model = make(family, tmp_path_factory.mktemp(family))
            made[family] = (add_mtp(model.folder) if family in QWEN else model.folder), model.theirs
        return made[family]

    return find


@contextmanager
def serving(folder: Path, proposer: Proposer | None = None, **flags: Any) -> Iterator[Bench]:
    settings = Settings.from_flat({**FLAGS, **flags})
    executor: Any = build_executor(locate(str(folder)), settings).executor
    if settings.speculative.speculative_algorithm == "NGRAM" and proposer is None:
        proposer = NgramProposer(settings.speculative)
    yield Bench(executor, proposer=proposer, enable_mixed_chunk=True, schedule_conservativeness=0.01)
    executor.close()


def expected(theirs: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return theirs.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


BASE = draw(40, seed=1)
WAVES = (  # a batch, and then prompts that begin as others did
    [draw(length, seed=length) for length in (3, 37, 1, 20)] + [[7, 8, 9] * 5],
    [BASE + draw(9, seed=2)],
    [BASE + draw(5, seed=3), draw(6, seed=12)],
    [BASE + draw(4, seed=4)],
)
PROMPTS = [prompt for wave in WAVES for prompt in wave]


def served(bench: Bench) -> list[tuple[list[int], int]]:
    """What is said to the prompts, and what was cached of them."""
    handle = 0
    for wave in WAVES:
        for prompt in wave:
            bench.ask(handle, prompt, **GREEDY)
            handle += 1
        bench.run()
    return [(bench.out.outputs[handle], bench.out.started[handle].cached_tokens) for handle in range(len(PROMPTS))]


def flags_of(kind: str, models: Any) -> dict[str, Any]:
    if kind == "known":
        return {}
    path = str(models("llama")[0]) if kind == "STANDALONE" else None
    return {"speculative_algorithm": kind, "speculative_draft_model_path": path}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3_next", "NEXTN"),
        ("qwen3_next", "known"),
        ("nemotron_h", "known"),
        *(
            pytest.param(family, kind, marks=pytest.mark.long)
            for family, kind in (
                ("qwen3_next", "NGRAM"),
                ("qwen3_next", "STANDALONE"),
                ("qwen3_5_text", "NEXTN"),
                ("qwen3_5_moe_text", "NEXTN"),
                ("qwen3_5_moe", "NEXTN"),  # whose checkpoint has a vision tower
                ("kimi_linear", "known"),
                ("lfm2_moe", "known"),
            )
        ),
    ],
)
def test_a_batch_says_what_it_says_without(family: str, kind: str, models: Any) -> None:
    """Chunks of prompts beside decodes with drafts; prefixes that go on with copies of states."""
    folder, theirs = models(family)
    with serving(folder) as bench:
        without = served(bench)
    answers = [[*prompt, *output] for prompt, (output, _) in zip(PROMPTS, without, strict=True)]
    with serving(folder, RightOrWrong(answers) if kind == "known" else None, **flags_of(kind, models)) as bench:
        assert served(bench) == without
        drafting = bench.scheduler._planner.drafting
    assert [output for output, _ in without] == [expected(theirs, prompt) for prompt in PROMPTS]
    assert [cached for _, cached in without][-1] == 40, "a state was kept where prompts branch off"
    assert 0 <= drafting.held < drafting.proposed and (drafting.held > 20 or kind != "known")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "page_size"), [("known", 4), ("NEXTN", 1)])
def test_retraction_changes_nothing(kind: str, page_size: int, models: Any) -> None:
    folder, theirs = models("qwen3_next")
    prompts = [draw(20, seed=seed) for seed in (21, 22, 23)]
    said = [expected(theirs, prompt) for prompt in prompts]
    known = RightOrWrong([[*prompt, *output] for prompt, output in zip(prompts, said, strict=True)])
    few = {"max_total_tokens": 60, "page_size": page_size, **flags_of(kind, models)}
    with serving(folder, known if kind == "known" else None, **few) as bench:
        for handle, prompt in enumerate(prompts):
            bench.ask(handle, prompt, **GREEDY)
        bench.run()
        assert sum(bench.out.retractions.values()) > 0
        assert [bench.out.outputs[handle] for handle in range(3)] == said


class Wrong(RightOrWrong):
    """Knows the answers, and says none of them."""

    def propose(self, known: IntArray, namespace: str, count: int) -> tuple[IntArray, int]:
        whole = next(answer for answer in self._answers if answer[: len(known)] == known.tolist())
        found = [(token + 1) % VOCAB for token in whole]
        return np.array(found[len(known) : len(known) + count], dtype=np.int32), 2


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "lfm2_moe"])
def test_drafts_that_fail_leave_no_trace_in_the_state(family: str, models: Any) -> None:
    folder, theirs = models(family)
    prompt, states = draw(18, seed=5), []
    answers = [[*prompt, *expected(theirs, prompt)]]
    for proposer in (None, Wrong(answers), RightOrWrong(answers)):
        with serving(folder, proposer) as bench:
            bench.ask(0, prompt, **GREEDY)
            bench.run()
            assert [*prompt, *bench.out.outputs[0]] == answers[0]
            drafting, executor = bench.scheduler._planner.drafting, bench.executor
            inner: Any = executor._inner  # type: ignore[attr-defined]
            page = inner._rows.mirror.pages[-1][0, 0]
            states.append(inner._pool.states._memory[page].clone())
        if isinstance(proposer, Wrong):
            assert drafting.held == 0 and drafting.proposed > NEW
    for with_drafts in states[1:]:
        torch.testing.assert_close(with_drafts, states[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", QWEN[:3])
@torch.inference_mode()
def test_the_layer_for_further_tokens_guesses_as_published(
    family: str, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of embedding and hidden state, each normalised, one of transformers' layers that attend, and a norm."""
    folder, theirs = models(family)
    found: list[tuple[int, list[int]]] = []
    guess = Drafter.guess

    def recorded(self: Drafter, plan: Any, layout: Any, *args: Any) -> Guessed:
        drafts = guess(self, plan, layout, *args)
        found.append((int(layout.context_lens[0]), drafts.tokens.tolist()))
        return drafts

    monkeypatch.setattr(Drafter, "guess", recorded)
    prompt = draw(23, seed=6)
    with serving(folder, speculative_algorithm="NEXTN", speculative_num_steps=3) as bench:
        bench.ask(0, prompt, **GREEDY)
        bench.run()
        tokens = [*prompt, *bench.out.outputs[0]]

    stored = load_file(folder / "model.safetensors")
    layer = make_layer(theirs, stored)
    model: Any = theirs.model

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + theirs.config.rms_norm_eps)
        return scaled * (1 + stored[f"mtp.{name}.weight"])

    def advance(ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        embedded = norm(model.embed_tokens(torch.tensor(ids)), "pre_fc_norm_embedding")
        both = torch.cat((embedded, norm(hidden, "pre_fc_norm_hidden")), dim=-1)
        places, count = torch.arange(len(ids))[None], len(ids)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        x = (both @ stored["mtp.fc.weight"].T)[None]
        positions = places if "next" in family else places.expand(3, 1, -1)
        rotations = model.rotary_emb(x, positions)
        x = layer(x, position_embeddings=rotations, attention_mask=mask, position_ids=places)
        return norm((x[0] if isinstance(x, tuple) else x)[0], "norm")

    assert len(found) > 4
    for known, drafts in found:
        hidden, guessed = model(torch.tensor([tokens[:known]])).last_hidden_state[0], list[int]()
        for _ in drafts:
            given = advance([*tokens[1 : known + 1], *guessed], hidden)
            guessed.append(int((given[-1] @ stored["lm_head.weight"].T).argmax()))
            hidden = torch.cat((hidden, given[-1:]))
        assert drafts == guessed


def make_layer(theirs: Any, stored: dict[str, torch.Tensor]) -> Any:
    """That of the target which attends, with the weights of `mtp.layers.0`."""
    layer = type(theirs.model.layers[1])(theirs.config, 1).float().eval()
    own, prefix = dict[str, torch.Tensor](), "mtp.layers.0."
    of_layer = {name.removeprefix(prefix): weight for name, weight in stored.items() if name.startswith(prefix)}
    for name, target in layer.state_dict().items():
        if name in of_layer:
            own[name] = of_layer[name]
        else:  # which are saved one by one
            parts = ("gate", "up") if "gate_up" in name else ("down",)
            each = [
                torch.cat([of_layer[f"mlp.experts.{expert}.{part}_proj.weight"] for part in parts])
                for expert in range(len(target))
            ]
            own[name] = torch.stack(each)
    layer.load_state_dict(own)
    return layer


@pytest.mark.parametrize(
    ("family", "flags", "text"),
    [
        ("qwen3_next", {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 2}, "chains of drafts, no trees"),
        ("nemotron_h", {"speculative_algorithm": "NEXTN"}, r"has no layer .*model\.layers\.\d+\.eh_proj\.weight"),
        ("bare", {"speculative_algorithm": "NEXTN"}, r"has no layer .*mtp\.fc\.weight"),
    ],
)
def test_what_cannot_be_is_refused(family: str, flags: dict[str, Any], text: str, models: Any, tmp_path: Path) -> None:
    folder = make("qwen3_next", tmp_path).folder if family == "bare" else models(family)[0]
    with pytest.raises(SettingsError, match=text):
        build_executor(locate(str(folder)), Settings.from_flat({**FLAGS, **flags}))
