"""The default model (9 heads, 3 KV heads) on ranks, stages and replicas: under a mixed load that does not fit the cache
each gives the greedy tokens of one rank, in fp32, and leaves no page behind."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest

from bough import Engine, SettingsError
from bough.core.settings import ModelSettings, Settings
from bough.executor.load_model import check_split, resolve_config
from bough.loader.locate import find_files
from tests.parity.engines import fp32_engine
from tests.system.serving import until

# Torch computes on every split, as it must where ranks add up. A replica's half of the load is too much for the pool,
# too. Prompts come in chunks of 16 tokens.
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "cpu_threads": 1,
    "attention_backend": "torch",
    "check_ranks": True,
    "max_total_tokens": 36,
    "schedule_conservativeness": 0.0,
    "chunked_prefill_size": 16,
}
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}  # two of them do not fit the pool
PATTERN = "[0-9]{3} [a-z]{4,8} rivers\\."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "people": {"type": "integer", "maximum": 9999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
SHARED = "Rivers carry water from the mountains to the sea. They are used for trade, for power and for food. "
BRIEF = {**GREEDY, "max_new_tokens": 4}
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
SHAPED = {"temperature": 0.0, "max_new_tokens": 20}  # its grammar ends it

# The prompt of each request, its sampling, and what else it asks for. The short prompts fit the pool together, their
# answers do not: the last of them lose their places.
REQUESTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "short": ("The capital of France is", GREEDY, {}),
    "stop": ("One, two, three, four,", {**GREEDY, "stop": [" ten", " eight"]}, {}),
    "penalties": ("Dogs, dogs, dogs, dogs", {**GREEDY, "frequency_penalty": 0.8, "presence_penalty": 0.3}, {}),
    "logprobs": ("Water boils at", GREEDY, LOGPROBS),
    "shaped logprobs": ("A number: ", {**SHAPED, "regex": "[0-9]{3}-[0-9]{4}-[a-z]{6}"}, LOGPROBS),
    "regex": ("Tell me how many rivers: ", {**SHAPED, "regex": PATTERN}, {}),
    "schema": ("A city as JSON: ", {**SHAPED, "json_schema": json.dumps(SCHEMA)}, {}),
    "chunked": (f"{SHARED}The longest of them is", BRIEF, {}),
    "cached": (f"{SHARED}In the north of Europe", BRIEF, {}),
    "chunked logprobs": (f"{SHARED}Near the sea", BRIEF, LOGPROBS),
}
ENDLESS = {**GREEDY, "max_new_tokens": 30}
ABORTED = {"aborted": ("Once upon a time", ENDLESS), "aborted shape": ("Say: ", {**ENDLESS, "regex": "[a-z ]{400}"})}


def mixed_load(engine: Engine) -> dict[str, dict[str, Any]]:
    """The outputs of all requests, which run together. Those that are aborted have begun before the others."""

    async def ask(name: str) -> dict[str, Any]:
        prompt, sampling, options = REQUESTS[name]
        return dict(await engine.async_generate(prompt, sampling, **options))

    async def doom(name: str, begun: asyncio.Event) -> dict[str, Any]:
        prompt, sampling = ABORTED[name]
        last: dict[str, Any] = {}
        async for last in await engine.async_generate(prompt, sampling, rid=name, stream=True):
            begun.set()
            if len(last["output_ids"]) >= 12:
                await asyncio.to_thread(engine.abort_request, name)
        return last

    async def all_of_them() -> dict[str, dict[str, Any]]:
        begun = {name: asyncio.Event() for name in ABORTED}
        tasks = {name: asyncio.create_task(doom(name, begun[name])) for name in ABORTED}
        for each in begun.values():
            await each.wait()
        tasks |= {name: asyncio.create_task(ask(name)) for name in REQUESTS}
        return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))

    return asyncio.run(all_of_them())


def outputs_of(**split: int) -> dict[str, dict[str, Any]]:
    """With what every split must show: requests were aborted and retracted, and no page is in use at the end."""
    with fp32_engine(**{**SETTINGS, **split}) as engine:
        outputs = mixed_load(engine)
        assert [outputs[name]["meta_info"]["finish_reason"]["type"] for name in ABORTED] == ["abort"] * len(ABORTED)

        def states() -> list[dict[str, Any]]:
            return list(engine.get_server_info()["internal_states"])

        until(lambda: not any(state["num_used_tokens"] for state in states()), "no page in use")
        assert all(state["num_running_reqs"] == state["num_waiting_reqs"] == 0 for state in states())
        assert sum(state["num_retractions"] for state in states()) > 0 and len(states()) == split.get("dp_size", 1)
        assert engine.flush_cache()
        assert not any(state["num_used_tokens"] or state["cached_prefix_tokens"] for state in states())
        return outputs


@pytest.fixture(scope="module")
def of_one_rank() -> dict[str, dict[str, Any]]:
    """Its grammars and stop strings do what they are there for."""
    outputs = outputs_of()
    assert re.fullmatch(PATTERN, outputs["regex"]["text"])
    jsonschema.validate(json.loads(outputs["schema"]["text"]), SCHEMA)
    assert outputs["stop"]["meta_info"]["finish_reason"]["type"] == "stop"
    return outputs


def same_logprobs(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The tokens, and their logprobs as far as sums in another order leave them alone."""
    for key in ("input_token_logprobs", "output_token_logprobs"):
        mine, its = found["meta_info"][key], expected["meta_info"][key]
        assert [entry[1] for entry in mine] == [entry[1] for entry in its]
        given = [[entry[0] for entry in entries if entry[0] is not None] for entries in (mine, its)]
        assert given[0] == pytest.approx(given[1], abs=1e-3)
    for mine, its in zip(*(each["meta_info"]["output_top_logprobs"] for each in (found, expected)), strict=True):
        assert [entry[0] for entry in mine] == pytest.approx([entry[0] for entry in its], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    [
        {"tp_size": 3},
        {"pp_size": 2},
        # In test_engine_replicas.py replicas have this model, and a load that does not fit on a smaller one.
        pytest.param({"dp_size": 2}, marks=pytest.mark.long),
        pytest.param({"tp_size": 3, "pp_size": 2}, marks=pytest.mark.long),
    ],
    ids=lambda split: "-".join(f"{name}{size}" for name, size in split.items()),
)
def test_the_default_model_gives_the_tokens_of_one_rank_under_load(
    split: dict[str, int], of_one_rank: dict[str, dict[str, Any]]
) -> None:
    outputs = outputs_of(**split)
    for name in REQUESTS:
        found, expected = outputs[name], of_one_rank[name]
        assert (found["output_ids"], found["text"]) == (expected["output_ids"], expected["text"]), name
        assert found["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"], name
        if "return_logprob" in REQUESTS[name][2]:
            same_logprobs(found, expected)
    for name in ABORTED:  # an abort comes after any number of tokens
        mine, its = outputs[name]["output_ids"], of_one_rank[name]["output_ids"]
        shorter = min(len(mine), len(its))
        assert shorter > 0 and mine[:shorter] == its[:shorter], name
    if "dp_size" in split:
        assert {output["meta_info"]["dp_rank"] for output in outputs.values()} == {0, 1}


def test_other_numbers_of_ranks_are_refused_with_those_that_fit() -> None:
    for size in (2, 4, 10):  # before a process is started
        told = rf"--tp-size {size}: num_heads \(9\) cannot be divided .* Sizes that fit this model: 1, 3\."
        with pytest.raises(SettingsError, match=told):
            Engine(device="cpu", tp_size=size)
    config = resolve_config(find_files(ModelSettings()), Settings())
    with pytest.raises(SettingsError, match=r"--tp-size 9: intermediate_size \(1536\) .* fit this model: 1, 3\."):
        check_split(config, 9)  # as a rank does
