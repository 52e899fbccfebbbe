"""What trainers ask for on the CUDA executor, without a GPU: hidden states, experts and vectors in the place of tokens
are Transformers', beside rows that ask for nothing, which go on by graphs. Triton's interpreter computes, as in
`test_executor_cuda_simulated`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

from bough.client.embeds import embedded
from bough.core.plan import Limits
from bough.core.pooling import ALL_EXPERTS, ALL_STATES
from bough.core.settings import Settings
from bough.executor import graphs
from bough.executor.cuda_executor import CudaExecutor
from bough.executor.cuda_parts import assemble
from bough.executor.graphs import GraphSizes
from bough.executor.load_draft import find_draft
from bough.executor.load_model import load_model, resolve_config
from bough.executor.weights import WeightStore
from bough.kernels.triton_ops import TRITON
from bough.loader.locate import locate
from tests.executor.test_executor_cuda_simulated import CPU, Rerun, no_device  # noqa: F401  (a fixture for all tests)
from tests.fakes.boxes import FakeOutbox
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.grammars import EOS, FakeGrammars, grammar
from tests.fakes.known_answers import RightOrWrong
from tests.fakes.ranks import MOE
from tests.fakes.scheduler_bench import Bench
from tests.parity.draft_models import write_eagle3, write_target

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}
PROMPTS = [[5, 9, 17, 33, 2, 64, 90], [7] * 11, [5, 9, 17, 33, 3]]
SIZES = GraphSizes(decode=(1, 2, 4), mixed=(12,))
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many graphs have been replayed."""
    count = [0]

    class Counted(Rerun):
        def replay(self) -> torch.Tensor:
            count[0] += 1
            return super().replay()

    monkeypatch.setattr(graphs, "Captured", Counted)
    monkeypatch.setattr("bough.kernels.registry.ops_for", lambda device, deterministic: TRITON)
    return count


def build(folder: Path, sizes: GraphSizes = SIZES, **flags: Any) -> tuple[CudaExecutor, int]:
    """The executor, and the number of tokens of its largest chunk."""
    files = locate(str(folder))
    settings = Settings.from_flat({"dtype": "float32", "context_length": 64, "page_size": 2, **flags})
    config = resolve_config(files, settings)
    loaded, draft = load_model(files, settings, config, CPU), find_draft(settings, files, config)
    drafts = {} if draft is None else {"drafts": 3, "adaptive_drafts": False}
    limits = Limits(4, 2, (80,), 64, config.vocab_size, 8, "", media=loaded.media_limits, **drafts)
    beside = None if draft is None else draft.load(settings, loaded)
    executor = assemble(loaded, settings, limits, sizes, WeightStore(loaded, files, settings), beside)
    while executor.idle():
        pass
    return executor, limits.chunk_tokens


def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def compare_states(model: Any, out: FakeOutbox, handle: int, prompt: list[int], unread: int = 1) -> None:
    """`unread`: so many tokens at the end no step has read."""
    ids = [*prompt, *out.outputs[handle][:-unread]]
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    assert out.states[handle][0].first == 0
    found = np.frombuffer(b"".join(part.values for part in out.states[handle]), np.float32).reshape(len(ids), -1)
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["graphs", "ngram", "EAGLE3"])
def test_hidden_states_beside_rows_without(kind: str, tmp_path: Path, replays: list[int]) -> None:
    flags: dict[str, Any] = {"enable_return_hidden_states": True}
    folder = write_target(tmp_path / "model", layers=4 if kind == "EAGLE3" else 1)
    if kind == "EAGLE3":
        write_eagle3(tmp_path / "head")
        flags |= {"speculative_algorithm": kind, "speculative_draft_model_path": tmp_path / "head"}
    flags |= NGRAM if kind == "ngram" else {}
    sizes = {"ngram": GraphSizes(drafted={1: (2,), 4: (2,)}), "EAGLE3": GraphSizes()}.get(kind, SIZES)
    executor, _ = build(folder, sizes, **flags)
    model = reference(folder)
    answers = [
        model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, eos_token_id=-1)[0].tolist()
        for prompt in PROMPTS
    ]
    bench = Bench(
        cast(Any, executor),
        eos_ids=(EOS,),
        grammars=FakeGrammars(),
        proposer=RightOrWrong(answers) if kind == "ngram" else None,
        enable_mixed_chunk=True,
        enable_return_hidden_states=True,
    )
    for handle, prompt in enumerate(PROMPTS):
        bench.ask(handle, prompt, **GREEDY, pooling=ALL_STATES if handle else None)
    masked = {"temperature": 0.0, "max_new_tokens": 9, "regex": grammar([[11, 22, 33], [44, 33]])}
    if kind != "ngram":  # whose answers are known beforehand
        bench.ask(3, [5, 6], **masked, pooling=ALL_STATES)
    bench.run()
    assert [[*prompt, *bench.out.outputs[handle]] for handle, prompt in enumerate(PROMPTS)] == answers
    assert set(bench.out.states) == {1, 2, 3} - ({3} if kind == "ngram" else set())
    for handle in bench.out.states:
        unread = 2 if handle == 3 else 1  # its grammar forces the last token together with the one before
        compare_states(model, bench.out, handle, [*PROMPTS, [5, 6]][handle], unread)
    before = replays[0]
    bench.ask(4, PROMPTS[0], **GREEDY)  # alone, in a row that may have had states
    bench.run()
    assert bench.out.outputs[4] == bench.out.outputs[0] and 4 not in bench.out.states
    assert (replays[0] > before) == (kind != "EAGLE3")
    executor.close()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"expert_distribution_recorder_mode": "stat"}])
def test_experts_beside_rows_without(tmp_path: Path, replays: list[int], parallel: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path / "model", 3, **{**MOE, "head_dim": 16})
    executor, _ = build(folder, enable_return_routed_experts=True, **parallel)
    model = reference(folder)
    bench = Bench(cast(Any, executor), enable_mixed_chunk=True, enable_return_routed_experts=True)
    for handle, prompt in enumerate(PROMPTS):
        bench.ask(handle, prompt, **GREEDY, pooling=ALL_EXPERTS if handle else None)
    bench.run()
    assert set(bench.out.states) == {1, 2}
    for handle in (1, 2):
        ids = [*PROMPTS[handle], *bench.out.outputs[handle][:-1]]
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(2).indices for layer in logits], 1).sort(-1).values
        content = b"".join(part.values for part in bench.out.states[handle])
        found = np.sort(np.frombuffer(content, np.int32).reshape(len(ids), len(logits), 2), -1)
        assert np.array_equal(found, expected.numpy())
    before = replays[0]
    bench.ask(3, PROMPTS[0], **GREEDY)
    bench.run()
    assert bench.out.outputs[3] == bench.out.outputs[0] and replays[0] > before
    executor.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["graphs", "EAGLE3"])
def test_vectors_in_the_place_of_tokens(kind: str, tmp_path: Path, replays: list[int]) -> None:
    flags: dict[str, Any] = {}
    if kind == "EAGLE3":
        write_eagle3(tmp_path / "head")
        flags = {"speculative_algorithm": kind, "speculative_draft_model_path": tmp_path / "head"}
    folder = write_target(tmp_path / "model", layers=4 if kind == "EAGLE3" else 1)
    executor, chunk = build(folder, GraphSizes() if flags else SIZES, **flags)
    model = reference(folder)
    width, draw = model.config.hidden_size, torch.Generator().manual_seed(3)
    vectors = [torch.randn(count, width, generator=draw) * 0.3 for count in (5, chunk + 3)]
    bench = Bench(cast(Any, executor), enable_mixed_chunk=True)
    prompts = [embedded(each.numpy()) for each in vectors]
    for handle, prompt in enumerate(prompts):
        bench.ask(handle, prompt["ids"].tolist(), **GREEDY, media=prompt["media"])
    bench.ask(2, PROMPTS[0], **GREEDY)
    bench.run()
    for handle, each in enumerate(vectors):
        expected = model.generate(inputs_embeds=each[None], max_new_tokens=5, do_sample=False, eos_token_id=-1)
        assert bench.out.outputs[handle] == expected[0].tolist()
    expected = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=5, do_sample=False, eos_token_id=-1)
    assert [*PROMPTS[0], *bench.out.outputs[2]] == expected[0].tolist()
    assert kind == "EAGLE3" or replays[0] > 0
    executor.close()
