"""Pages of every kind arrive as they were: with real models, a pair of engines gives one engine's logprobs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from bough.core.plan import Executor
from bough.core.settings import Settings
from bough.disaggregation.wire import Identity
from bough.executor.build import build_executor
from bough.launch.disaggregation import open_handover
from bough.loader.locate import ModelFiles, locate
from bough.messages.requests import FlushCache, LogprobRequest
from tests.executor.test_executor_pipelines import CONFIGS
from tests.executor.test_executor_ranks import with_ranks
from tests.executor.test_executor_tiers import KINDS, PROMPT
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.engine_pair import EnginePair

Flags = dict[str, Any]
FLAGS: Flags = {"max_total_tokens": 64, "max_running_requests": 2, "chunked_prefill_size": 8}


def hand_over(prefill: Executor, decode: Executor, close: float = 1e-5) -> None:
    """The prefill engine is asked by itself first."""
    pair = EnginePair(lambda: cast(Any, prefill), decode_executor=cast(Any, decode))
    wants = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True, "logprobs": LogprobRequest(start=0)}
    pair.prefill.ask(1, PROMPT, **wants)
    pair.run()
    pair.prefill.submit(FlushCache(0))
    pair.ask(1, PROMPT, **wants)
    pair.run()
    alone, paired = pair.prefill.out, pair.decode.out
    assert paired.outputs[1] == alone.outputs[1] and len(paired.outputs[1]) == 6
    assert paired.scores[1] == pytest.approx(alone.scores[1], abs=close)
    assert paired.started[1].input_logprobs == alone.started[1].input_logprobs
    left = len(PROMPT) % decode.limits().page_size
    assert pair.decode.scheduler._committer.prefilled_tokens == left + 1, "the rest of the prompt was handed over"


@pytest.mark.parametrize("kind", KINDS)
def test_answers_behind_pages_that_were_handed_over(kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", 3, **CONFIGS[kind.split()[0]])
    settings = Settings.from_flat({"device": "cpu", "cpu_threads": 1, **FLAGS, **KINDS[kind]})
    engines = [build_executor(locate(str(folder)), settings).executor for _ in range(2)]
    hand_over(*engines)
    for engine in engines:
        engine.close()


def test_the_parts_of_all_ranks_arrive(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", 3, **CONFIGS["llama"])
    with_ranks(folder, 2, lambda one: with_ranks(folder, 2, lambda two: hand_over(one, two), **FLAGS), **FLAGS)


# -- engines that differ -----------------------------------------------------------------------------------------------


def identity_of(files: ModelFiles, executor: Executor, settings: Settings) -> Identity:
    """As an engine that starts says it of itself."""
    spec, ends = cast(Any, SimpleNamespace(files=files)), cast(Any, (SimpleNamespace(socket=0), None))
    with zmq.Context() as context:
        side, _, _ = open_handover(spec, settings, executor, context, ends)
    return cast(Identity, cast(Any, side)._identity)


def identity_with(folder: Path, flags: Flags) -> Identity:
    own = {"device": "cpu", "cpu_threads": 1, "disaggregation_mode": "decode", **FLAGS, **flags}
    settings, files, found = Settings.from_flat(own), locate(str(folder)), []
    if settings.parallel.tp_size > 1:
        with_ranks(folder, 2, lambda executor: found.append(identity_of(files, executor, settings)), **FLAGS)
        return found[0]
    executor = build_executor(files, settings).executor
    try:
        return identity_of(files, executor, settings)
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"page_size": 4}, "page_size (1 and 4)"),
        ({"dtype": "bfloat16"}, "cache_dtype (torch.float32 and torch.bfloat16)"),
        ({"kv_cache_dtype": "bf16"}, "cache_dtype (torch.float32 and torch.bfloat16)"),
        ({"tp_size": 2}, "tp_size (1 and 2)"),
        ({"json_model_override_args": '{"rope_theta": 500.0}'}, "model ("),
        ({}, ""),
    ],
    ids=lambda value: next(iter(value), "alike") if isinstance(value, dict) else "",
)
def test_engines_whose_pages_differ_know_it_before_they_send_any(flags: Flags, word: str, tmp_path: Path) -> None:
    """What the prefill engine makes of it, when they are paired, is in test_disaggregation_pair.py."""
    folder = write_checkpoint(tmp_path / "model", 3, **CONFIGS["llama"])
    one, other = (identity_with(folder, {"dtype": "float32", **each}) for each in ({}, flags))
    objection = one.objection(other)
    assert word in objection and bool(objection) == bool(word)


def test_engines_whose_caches_have_other_scales_know_it(tmp_path: Path) -> None:
    """Of an fp8 cache, which needs a GPU: none is built here."""
    files = locate(str(write_checkpoint(tmp_path / "model", 3, **CONFIGS["llama"])))
    executor = build_executor(files, Settings.from_flat({"device": "cpu", "cpu_threads": 1, **FLAGS})).executor
    found = []
    for number, text in enumerate(["", "{}", '{"kv_cache": {}}', "{}"]):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        scales = {"quantization_param_path": str(path)} if text else {}
        settings = Settings.from_flat({"device": "cpu", "disaggregation_mode": "decode", **scales})
        found.append(identity_of(files, executor, settings))
    executor.close()
    plain, given, others, again = found
    assert "cache_scales (the model's and " in plain.objection(given) and "cache_scales" in given.objection(others)
    assert given.objection(again) == ""
