"""Programs on the default model, in this process and over HTTP: roles, choices, branches, how much of their prompts is
reused, and every example, with the same text on both."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import bough as sgl
from tests.fakes.examples import NAMES, load_example
from tests.fakes.lang_recording import Recording, share_of
from tests.system.serving import running

GREEDY: dict[str, Any] = {"temperature": 0}
SETTINGS: dict[str, Any] = {"max_total_tokens": 20_000, "random_seed": 7}
EXPECTED = {  # words that the default model's answer must hold, where it can be relied upon
    "few_shot_qa": "Paris",
    "json_extraction": '"name": "Ada Lovelace"',
    "multi_turn_chat": "The capital of France is Paris.",
    "react_calculator": "Observation: 45",
    "batch_evaluation": "3. Rating: ",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    with sgl.Engine(**SETTINGS) as started:
        yield started


@pytest.fixture(scope="module")
def endpoint() -> Iterator[sgl.RuntimeEndpoint]:
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with running(*flags) as server:
        yield sgl.RuntimeEndpoint(server.url)


@pytest.fixture(autouse=True)
def _default_back_end(engine: sgl.Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sgl.global_config, "default_backend", engine)
    yield


@sgl.function
def conversation(s: Any) -> None:
    s += sgl.user("Say hello to Ada.")
    s += sgl.assistant(sgl.gen("first", max_tokens=12))
    s += sgl.user("And to Bob.")
    s += sgl.assistant(sgl.gen("second", max_tokens=6))


def test_a_conversation_is_written_as_the_models_template_renders_it(engine: sgl.Engine) -> None:
    state = conversation.run(**GREEDY)
    assert engine.tokenizer is not None
    assert state.text() == engine.tokenizer.apply_chat_template(state.messages(), add_generation_prompt=False)
    asked = engine.tokenizer.apply_chat_template(state.messages()[:1])
    direct = engine.generate(
        input_ids=engine.tokenizer.encode(asked, False), sampling_params={"max_new_tokens": 12, **GREEDY}
    )
    assert direct["text"] == state["first"]
    second = state.get_meta_info("second")
    assert second["cached_tokens"] >= state.get_meta_info("first")["prompt_tokens"] + 10  # the whole first turn
    streamed = conversation.run(**GREEDY, stream=True)
    assert len(list(streamed.text_iter("first"))) > 1 and streamed.text() == state.text()


def test_choices_are_scored_in_one_batch_over_the_shared_prefix(engine: sgl.Engine) -> None:
    @sgl.function
    def choose(s: Any, method: Any, choices: Any = ("London", "Paris", "Rome")) -> None:
        s += "Question: what is the capital city of France? Answer: "
        s += sgl.select("city", choices=choices, choices_method=method)

    for method in (
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    ):
        state = choose.run(method)
        assert state["city"] == "Paris" and state.text().endswith("Answer: Paris")
    engine.flush_cache()
    state = choose.run(sgl.token_length_normalized, ["London", "Paris", "New Delhi"])
    prompt = state.get_usage().prompt_tokens // 3
    assert state.get_usage().cached_tokens >= 2 * (prompt - 4)
    tokens = state.get_meta_info("city")["input_token_logprobs"]
    assert "".join(entry[2] for entry in tokens[2]) == " New Delhi"  # the space before it is healed into it


def test_scores_are_the_engines_own_logprobs(engine: sgl.Engine) -> None:
    @sgl.function
    def choose(s: Any) -> None:
        s += "The capital of France is"
        s += sgl.select("city", choices=[" Paris", " Rome"])

    meta = choose.run().get_meta_info("city")
    output = engine.generate(
        "The capital of France is", {"max_new_tokens": 1, **GREEDY}, return_logprob=True, top_logprobs_num=200
    )
    likely = {entry[1]: entry[0] for entry in output["meta_info"]["output_top_logprobs"][0]}
    for tokens in meta["input_token_logprobs"]:
        (entry,) = tokens
        assert likely[entry[1]] == pytest.approx(entry[0], abs=1e-3)


@pytest.mark.parametrize(
    ("expr", "form"),
    [
        (sgl.gen_int("x", max_tokens=8), r"[-+]?\d+"),
        (sgl.gen("x", max_tokens=8, dtype=bool), "True|False"),
        (sgl.gen("x", max_tokens=8, regex="(red|blue) (cat|dog)"), "(red|blue) (cat|dog)"),
        (sgl.gen("x", max_tokens=24, json_schema={"enum": ["cat", "dog"]}), r'\s*"(cat|dog)"\s*'),
    ],
    ids=["int", "bool", "regex", "schema"],
)
def test_a_constraint_is_kept(expr: Any, form: str, engine: sgl.Engine, endpoint: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def constrained(s: Any) -> None:
        s += "The answer: " + expr

    here = constrained.run(**GREEDY, backend=engine)["x"]
    assert re.fullmatch(form, here)
    assert constrained.run(**GREEDY, backend=endpoint)["x"] == here


@pytest.mark.parametrize(
    ("dtype", "regex"),
    [(int, sgl.REGEX_INT), (float, sgl.REGEX_FLOAT), (bool, sgl.REGEX_BOOL), (str, sgl.REGEX_STR)],
)
def test_a_type_is_kept_over_the_openai_api(dtype: type, regex: str, endpoint: sgl.RuntimeEndpoint) -> None:
    pytest.importorskip("openai", reason="the openai SDK is not installed (pip install bough[dev])")
    backend = sgl.OpenAI("any-name", base_url=f"{endpoint.base_url}/v1", api_key="none", max_retries=0)

    @sgl.function
    def ask(s: Any) -> None:
        s += sgl.user("What is two plus two?")
        s += sgl.assistant(sgl.gen("x", max_tokens=32, dtype=dtype))

    state = ask.run(**GREEDY, backend=backend)
    assert re.fullmatch(regex, state["x"])
    assert backend.token_usage.completion_tokens == state.get_meta_info("x")["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("medium", "field"), [(sgl.image(b"..."), "image_data"), (sgl.video(__file__, 2), "video_data")]
)
def test_a_model_that_does_not_see_says_so(medium: Any, field: str) -> None:
    @sgl.function
    def look(s: Any) -> None:
        s += sgl.user(medium + "What is it?") + sgl.assistant(sgl.gen("x", max_tokens=2))

    with pytest.raises(sgl.ProgramError, match=rf"leave {field} out"):
        look.run()


def running_requests(engine: sgl.Engine) -> int:
    running: int = engine.get_server_info()["internal_states"][0]["num_running_reqs"]
    return running


def test_branches_decode_in_one_batch(engine: sgl.Engine) -> None:
    @sgl.function
    def wide(s: Any) -> None:
        s += "Colours are"
        branches = s.fork(6)
        branches += lambda i: f" {('red', 'blue', 'green', 'black', 'white', 'grey')[i]},"
        branches += sgl.gen("more", max_tokens=40, ignore_eos=True)
        s["most"] = 0
        while s["most"] < 6 and not branches[0]._executor.over(outside=False):
            s["most"] = max(s["most"], running_requests(engine))
            threading.Event().wait(0.02)
        branches.join()

    engine.flush_cache()
    state = wide.run(**GREEDY)
    assert len(state["more"]) == 6 and state["most"] == 6
    usage = state.get_usage()
    assert (usage.cached_tokens, usage.prompt_tokens) == (5 * 3, 6 * 5)  # "Colours are" is computed once


def test_a_time_out_and_a_cancellation_end_the_requests_themselves(engine: sgl.Engine) -> None:
    @sgl.function
    def endless(s: Any) -> None:
        branches = s.fork(2)
        branches += "Once upon a time" + sgl.gen("rest", max_tokens=4000, ignore_eos=True)
        branches.join()

    with pytest.raises(sgl.ProgramError, match=r"took longer than 0.5 s"):
        endless.run(**GREEDY, timeout_s=0.5)
    state = endless.run(**GREEDY, stream=True)
    while not running_requests(engine):
        threading.Event().wait(0.02)
    state.cancel()
    assert "cancelled" in str(state.error())
    while running_requests(engine):  # ends only if the requests do, long before their 4000 tokens
        threading.Event().wait(0.02)


@pytest.mark.slow
def test_a_dead_engine_surfaces_in_run() -> None:
    with sgl.Engine(max_total_tokens=2000) as mortal:

        @sgl.function
        def long(s: Any) -> None:
            s += "Once upon a time" + sgl.gen("rest", max_tokens=1500, ignore_eos=True)

        state = long.run(backend=mortal, stream=True)
        next(iter(state.text_iter("rest")))
        mortal._processes.supervisor.children[0].process.kill()
        with pytest.raises(sgl.ProgramError, match="EngineDeadError"):
            state.sync()


# How much is reused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_a_batch_of_few_shot_questions_reuses_nearly_all_that_can_be(engine: sgl.Engine, count: int) -> None:
    example = load_example("few_shot_qa")
    engine.flush_cache()
    recording = Recording(engine)
    questions = [{"question": f"What is {i} plus {i * 7 % 13}?"} for i in range(count)]
    states = example.few_shot_qa.bind().run_batch(questions, backend=recording, temperature=0, num_threads=64)
    assert states.errors == {}
    reached, possible = share_of(recording, engine)
    assert reached >= possible - 0.02, (reached, possible)
    assert possible > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("fan_out", "depth"), [(2, 3), (4, 3)])
def test_a_tree_of_thought_reuses_nearly_all_that_can_be(engine: sgl.Engine, fan_out: int, depth: int) -> None:
    example = load_example("tree_of_thought")
    engine.flush_cache()
    recording = Recording(engine)
    state = example.tree_of_thought.run("Share 12 apples.", fan_out, depth, 4, backend=recording, temperature=0)
    assert state["leaves"] == fan_out**depth
    reached, possible = share_of(recording, engine)
    assert reached >= possible - 0.02, (reached, possible)


# Examples and HTTP ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_an_example_writes_the_same_in_process_and_over_http(
    name: str, engine: sgl.Engine, endpoint: sgl.RuntimeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load_example(name)
    texts = []
    for backend in (engine, endpoint):
        monkeypatch.setattr(sgl.global_config, "default_backend", backend)
        texts.append(example.main())
    assert texts[0] == texts[1] and EXPECTED.get(name, "") in texts[0]


def test_a_time_out_reaches_the_server(endpoint: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def endless(s: Any) -> None:
        s += "Once upon a time" + sgl.gen("rest", max_tokens=4000, ignore_eos=True)

    with pytest.raises(sgl.ProgramError, match=r"took longer than 0.5 s"):
        endless.run(backend=endpoint, timeout_s=0.5)
    while sgl.get_server_info(endpoint)["internal_states"][0]["num_running_reqs"]:  # ends only if the request does
        threading.Event().wait(0.02)


def test_what_the_engine_refuses_is_told_over_http_too(endpoint: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def look(s: Any) -> None:
        s += sgl.user(sgl.image(b"...") + "What is it?") + sgl.assistant(sgl.gen("x", max_tokens=2))

    with pytest.raises(
        sgl.ProgramError, match=r"in look: RequestError: This model takes no images; leave image_data out"
    ):
        look.run(backend=endpoint)


def test_there_are_the_examples_that_are_promised() -> None:
    assert {"multi_turn_chat_with_reasoning", "batch_evaluation"} < set(NAMES) and len(NAMES) == 11
