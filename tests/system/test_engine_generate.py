"""What a user sees of the offline engine, on the default model."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bough import Engine, RequestError, SamplingParams
from bough.native.library import instruction_sets, load_library

GREEDY = {"temperature": 0, "max_new_tokens": 16}
FRANCE = "The capital of France is"


def text_of(output: Any) -> str:
    return str(output["text"])


def test_a_prompt_comes_back_as_text_ids_and_meta(engine: Engine) -> None:
    output = engine.generate(FRANCE, GREEDY)
    assert text_of(output).startswith(" Paris")
    meta = output["meta_info"]
    assert meta["prompt_tokens"] == 5 and meta["completion_tokens"] == len(output["output_ids"]) == 16
    assert meta["finish_reason"] == {"type": "length", "length": 16}
    assert meta["id"] and meta["e2e_latency"] > 0


def test_lists_give_lists_and_ids_equal_text(engine: Engine) -> None:
    assert engine.tokenizer is not None
    prompts = [FRANCE, "Water boils at", "def add(a, b):"]
    by_text = engine.generate(prompts, GREEDY)
    by_ids = engine.generate(input_ids=[engine.tokenizer.encode(p) for p in prompts], sampling_params=[GREEDY] * 3)
    assert [text_of(o) for o in by_text] == [text_of(o) for o in by_ids]
    alone = [engine.generate(p, GREEDY) for p in prompts]
    assert [text_of(o) for o in alone] == [text_of(o) for o in by_text]


def test_a_stream_is_cumulative_and_ends_like_the_whole(engine: Engine) -> None:
    whole = engine.generate(FRANCE, GREEDY)
    pieces = list(engine.generate(FRANCE, GREEDY, stream=True))
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(pieces))
    assert pieces[-1]["text"] == text_of(whole) and pieces[-1]["output_ids"] == whole["output_ids"]
    assert [p["meta_info"]["finish_reason"] is None for p in pieces] == [True] * (len(pieces) - 1) + [False]


def test_a_batch_streams_with_indices(engine: Engine) -> None:
    last: dict[int, str] = {}
    for piece in engine.generate([FRANCE, "Two plus two is"], GREEDY, stream=True):
        last[piece["index"]] = piece["text"]
    assert [last[0], last[1]] == [text_of(o) for o in engine.generate([FRANCE, "Two plus two is"], GREEDY)]


def test_leaving_a_stream_early_ends_the_request(engine: Engine) -> None:
    stream = engine.generate(FRANCE, {"max_new_tokens": 2000, "ignore_eos": True}, stream=True)
    next(stream)
    stream.close()
    for _ in range(200):
        if engine.get_server_info()["internal_states"][0]["num_running_reqs"] == 0:
            return
    raise AssertionError("the abandoned request still runs")


def test_the_same_seed_gives_the_same_text_in_any_company(engine: Engine) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 7, "max_new_tokens": 24}
    alone = text_of(engine.generate("Once upon a time", sampling))
    crowd = engine.generate(
        ["Once upon a time", "Hello", "The sea", "Once upon a time"],
        [sampling, {"max_new_tokens": 20}, {"temperature": 1.5, "max_new_tokens": 9}, {**sampling, "sampling_seed": 8}],
    )
    assert text_of(crowd[0]) == alone
    assert text_of(crowd[3]) != alone


def test_n_samples_differ_and_the_first_is_the_plain_one(engine: Engine) -> None:
    sampling = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 16}
    samples = engine.generate("My favourite animal is", {**sampling, "n": 3})
    assert len(samples) == 3 and len({text_of(s) for s in samples}) == 3
    assert text_of(samples[0]) == text_of(engine.generate("My favourite animal is", sampling))


def test_stop_strings_cut_text_and_never_leak_into_a_stream(engine: Engine) -> None:
    free = text_of(engine.generate(FRANCE, {**GREEDY, "max_new_tokens": 24}))
    stop = free[6:12]
    pieces = list(engine.generate(FRANCE, {**GREEDY, "max_new_tokens": 24, "stop": stop}, stream=True))
    assert pieces[-1]["text"] == free[: free.index(stop)]
    assert pieces[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert all(free[: free.index(stop)].startswith(p["text"]) for p in pieces)
    kept = engine.generate(FRANCE, {**GREEDY, "max_new_tokens": 24, "stop": [stop], "no_stop_trim": True})
    assert text_of(kept) == free[: free.index(stop) + len(stop)]


def test_stop_regex_and_stop_token(engine: Engine) -> None:
    output = engine.generate(FRANCE, {**GREEDY, "stop_regex": r"\n+T"})
    assert output["meta_info"]["finish_reason"]["type"] == "stop"
    assert "\nT" not in text_of(output)
    ids = engine.generate(FRANCE, GREEDY)["output_ids"]
    output = engine.generate(FRANCE, {**GREEDY, "stop_token_ids": [ids[3]]})
    assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[3]}
    assert output["output_ids"] == ids[: ids.index(ids[3]) + 1]


def test_min_new_tokens_holds_back_the_end(engine: Engine) -> None:
    prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": "Say hi."}])  # type: ignore[union-attr]
    output = engine.generate(prompt, {"temperature": 0, "max_new_tokens": 60, "min_new_tokens": 50})
    assert output["meta_info"]["completion_tokens"] >= 50


def test_zero_new_tokens_fill_the_cache(engine: Engine) -> None:
    prompt = "A sentence that nobody has sent to this engine before, I believe."
    output = engine.generate(prompt, {"max_new_tokens": 0})
    assert output["text"] == "" and output["meta_info"]["completion_tokens"] == 0
    again = engine.generate(prompt + " Again", {"max_new_tokens": 1})
    assert again["meta_info"]["cached_tokens"] == output["meta_info"]["prompt_tokens"]


def test_logprobs_of_output_and_prompt(engine: Engine) -> None:
    output = engine.generate(
        FRANCE,
        {**GREEDY, "max_new_tokens": 4},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
        token_ids_logprob=[5, 6],
        return_text_in_logprobs=True,
    )
    meta, ids = output["meta_info"], output["output_ids"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
    assert meta["input_token_logprobs"][0][0] is None and len(meta["input_token_logprobs"]) == 5
    assert all(entry[0] < 0 for entry in meta["input_token_logprobs"][1:])
    for chosen, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert len(top) == 3 and math.isclose(top[0][0], chosen[0], abs_tol=1e-5)  # greedy: the best is the chosen one
        assert isinstance(chosen[2], str)
    assert [[entry[1] for entry in row] for row in meta["output_token_ids_logprobs"]] == [[5, 6]] * 4
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"]) == 5


@pytest.fixture
def exact(engine: Engine) -> Iterator[Engine]:
    """Computes prompts as it computes outputs. On CPUs with AMX only engines that were asked to be deterministic do."""
    library = load_library()
    if library is None or "amx" not in instruction_sets(library):
        yield engine
        return
    with Engine(max_total_tokens=2000, enable_deterministic_inference=True) as started:
        yield started


def test_prompt_logprobs_equal_those_of_generating_the_same_tokens(exact: Engine) -> None:
    """Scoring a text and generating it must agree, also through chunks and cached prefixes."""
    first = exact.generate(FRANCE, GREEDY, return_logprob=True)
    assert exact.tokenizer is not None
    prompt = exact.tokenizer.encode(FRANCE)
    scored = exact.generate(
        input_ids=prompt + first["output_ids"],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
    )
    generated = [entry[0] for entry in first["meta_info"]["output_token_logprobs"]]
    given = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"][1:]]
    assert given == pytest.approx(generated, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": ""}, "empty"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [1] * 9000}, "9000"),
        ({"input_ids": [49152]}, "vocabulary"),
        ({"input_ids": [-5]}, "vocabulary"),
        ({"input_ids": [1.5]}, "whole numbers"),
        ({"prompt": "a", "sampling_params": {"temprature": 1}}, "Did you mean 'temperature'"),
        ({"prompt": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"prompt": "a", "sampling_params": {"top_p": 1.5}}, "top_p"),
        ({"prompt": "a", "sampling_params": {"max_new_tokens": -3}}, "max_new_tokens"),
        ({"prompt": "a", "sampling_params": {"stop_regex": "("}}, "stop_regex"),
        ({"prompt": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias"),
        ({"prompt": "a", "sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"prompt": "a", "sampling_params": {"regex": "("}}, "regex"),
        ({"prompt": "a", "image_data": "x.png"}, "image_data"),
        ({"prompt": "a", "colour": "red"}, "colour"),
        ({"prompt": "a", "input_ids": [1]}, "exactly one"),
        ({}, "exactly one"),
        ({"prompt": "a\ud800b"}, "surrogate"),
        ({"prompt": {"a": 1}}, "list of strings"),
        ({"prompt": "a", "rid": 5}, "rid must be a string"),
        ({"prompt": "a", "rid": "\ud800"}, "surrogate"),
        ({"prompt": "a", "priority": 2**70}, "priority"),
        ({"prompt": "a", "sampling_params": SamplingParams(n="x")}, "whole number"),  # type: ignore[arg-type]
        ({"prompt": "a", "sampling_params": {"sampling_seed": 2**64}}, "sampling_seed"),
        ({"prompt": "a", "sampling_params": {"stop_token_ids": [2**64]}}, "stop_token_ids"),
        ({"prompt": "a", "sampling_params": {"logit_bias": {2**65: 1}}}, "logit_bias"),
        ({"prompt": "a", "return_logprob": True, "logprob_start_len": 2**70}, "logprob_start_len"),
    ],
)
def test_bad_input_gets_a_clear_error_and_the_engine_serves_on(
    engine: Engine, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        engine.generate(**arguments)
    assert text_of(engine.generate(FRANCE, {**GREEDY, "max_new_tokens": 2})).startswith(" Paris")


def test_parameters_made_by_hand_may_hold_a_single_stop(engine: Engine) -> None:
    stopped = engine.generate(FRANCE, SamplingParams(temperature=0, max_new_tokens=16, stop=" Paris"))  # type: ignore[arg-type]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": " Paris"}


@pytest.mark.parametrize("count", [1, 2])
def test_a_reader_who_pauses_gets_what_has_come_in_few_pieces(engine: Engine, count: int) -> None:
    sampling = {**GREEDY, "max_new_tokens": 60, "ignore_eos": True}
    prompts = [FRANCE, "Two plus two is"][:count]
    stream = engine.generate(prompts, sampling, stream=True)
    next(stream)
    while engine.get_server_info()["internal_states"][0]["num_running_reqs"]:
        pass  # the reader's pause: until the engine is through
    engine.generate(FRANCE, {**GREEDY, "max_new_tokens": 1})  # its answer comes behind all that was still under way
    rest = list(stream)  # for each prompt a piece that was on its way to the reader, and one with all that came after
    assert len(rest) <= 2 * count and all(len(p["output_ids"]) == 60 for p in rest[-count:])


def test_an_id_in_use_is_refused_and_a_longer_one_is_another(engine: Engine) -> None:
    long = {"max_new_tokens": 3000, "ignore_eos": True}
    one, two = (engine.generate(FRANCE, long, stream=True, rid=rid) for rid in ("job", "job-2"))
    next(one)
    next(two)
    with pytest.raises(RequestError, match="Duplicate request ID detected: 'job'"):
        engine.generate(FRANCE, GREEDY, rid="job")
    engine.abort_request("job")
    assert list(one)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert next(two)["meta_info"]["finish_reason"] is None
    two.close()
    assert engine.generate(FRANCE, GREEDY, rid="job")["meta_info"]["id"] == "job"


def test_answers_carry_the_prompt_on_demand_and_the_model_is_described(engine: Engine) -> None:
    assert engine.tokenizer is not None
    meta = engine.generate(FRANCE, GREEDY, return_prompt_token_ids=True)["meta_info"]
    assert meta["prompt_token_ids"] == engine.tokenizer.encode(FRANCE)
    assert (meta["weight_version"], meta["reasoning_tokens"]) == ("default", 0)
    info = engine.get_model_info()
    assert info["is_generation"] is True and info["served_model_name"] == "SmolLM2-135M-Instruct"
    assert info["model_path"].endswith(".gguf") and info["tokenizer_path"] == info["model_path"]


def test_one_bad_prompt_of_a_batch_leaves_the_others_alone(engine: Engine) -> None:
    outputs = engine.generate([FRANCE, "", FRANCE], {**GREEDY, "max_new_tokens": 2})
    assert text_of(outputs[0]) == text_of(outputs[2]) != ""
    reason = outputs[1]["meta_info"]["finish_reason"]
    assert reason["type"] == "abort" and "empty" in reason["message"]


def test_many_threads_share_one_engine(engine: Engine) -> None:
    results: dict[int, str] = {}

    def ask(i: int) -> None:
        results[i] = text_of(engine.generate(f"{i} is a number and", {**GREEDY, "max_new_tokens": 6}))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = engine.generate([f"{i} is a number and" for i in range(8)], {**GREEDY, "max_new_tokens": 6})
    assert [results[i] for i in range(8)] == [text_of(o) for o in expected]


def test_it_works_inside_a_running_event_loop(engine: Engine) -> None:
    async def go() -> tuple[Any, Any, list[str]]:
        blocking = engine.generate(FRANCE, GREEDY)
        answer = await engine.async_generate(FRANCE, GREEDY)
        pieces = [p["text"] async for p in await engine.async_generate(FRANCE, GREEDY, stream=True)]
        return blocking, answer, pieces

    blocking, answer, pieces = asyncio.run(go())
    assert text_of(blocking) == text_of(answer) == pieces[-1]


def test_cancelling_an_async_caller_ends_its_request(engine: Engine) -> None:
    async def go() -> None:
        task = asyncio.create_task(engine.async_generate(FRANCE, {"max_new_tokens": 3000, "ignore_eos": True}))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    for _ in range(200):
        if engine.get_server_info()["internal_states"][0]["num_running_reqs"] == 0:
            return
    raise AssertionError("the cancelled request still runs")


def test_abort_by_id_gives_what_there_is(engine: Engine) -> None:
    stream = engine.generate(FRANCE, {"max_new_tokens": 3000, "ignore_eos": True}, stream=True, rid="mine")
    next(stream)
    engine.abort_request("mine")
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort" and last["meta_info"]["id"] == "mine"


def test_flush_forgets_and_info_tells(engine: Engine) -> None:
    engine.generate(FRANCE, GREEDY)
    assert engine.flush_cache() is True
    assert engine.generate(FRANCE, GREEDY)["meta_info"]["cached_tokens"] == 0
    info = engine.get_server_info()
    assert info["max_total_num_tokens"] == 20_000 and info["served_model_name"] == "SmolLM2-135M-Instruct"
