"""Programs on the default model in this process: roles, choices, branches, and how much of their prompts is reused."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import bough as sgl
from bough.lang.backends.base import GenOutput, GenRequest, Scores
from bough.lang.backends.in_process import EngineBackend
from tests.fakes.examples import load_example

GREEDY = {"temperature": 0}


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
    ("expr", "form", "field"),
    [
        (sgl.gen_int("x", max_tokens=8), r"[-+]?\d+", "regex"),
        (sgl.gen("x", max_tokens=8, dtype=bool), "True|False", "regex"),
        (sgl.gen("x", max_tokens=8, regex="(red|blue) (cat|dog)"), "(red|blue) (cat|dog)", "regex"),
        (sgl.gen("x", max_tokens=24, json_schema={"enum": ["cat", "dog"]}), r'\s*"(cat|dog)"\s*', "json_schema"),
    ],
)
def test_a_constraint_is_kept_or_refused_by_its_name(expr: Any, form: str, field: str) -> None:
    @sgl.function
    def constrained(s: Any) -> None:
        s += "The answer: " + expr

    try:
        assert re.fullmatch(form, constrained.run(**GREEDY)["x"])
    except sgl.ProgramError as error:
        assert isinstance(error.__cause__, sgl.RequestError) and field in str(error.__cause__)


@pytest.mark.parametrize(
    ("medium", "field"), [(sgl.image(b"..."), "image_data"), (sgl.video("a.mp4", 2), "video_data")]
)
def test_a_model_that_does_not_see_says_so(medium: Any, field: str) -> None:
    @sgl.function
    def look(s: Any) -> None:
        s += sgl.user(medium + "What is it?") + sgl.assistant(sgl.gen("x", max_tokens=2))

    with pytest.raises(sgl.ProgramError, match=rf"{field} is not supported"):
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
        while s["most"] < 6 and not branches[0]._executor.over:
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
    with sgl.Engine(dtype="float32", quantization="none", max_total_tokens=2000) as mortal:

        @sgl.function
        def long(s: Any) -> None:
            s += "Once upon a time" + sgl.gen("rest", max_tokens=1500, ignore_eos=True)

        state = long.run(backend=mortal, stream=True)
        next(iter(state.text_iter("rest")))
        mortal._replica.supervisor.children[0].process.kill()
        with pytest.raises(sgl.ProgramError, match="EngineDeadError"):
            state.sync()


# How much is reused ---------------------------------------------------------------------------------------------------


class Recording(EngineBackend):
    """Remembers what was sent, in order, and what was found in the cache."""

    def __init__(self, engine: sgl.Engine) -> None:
        super().__init__(engine)
        self.sent: list[tuple[str, str, bool]] = []  # prompt, output, whether it counts
        self.prompt_tokens = self.cached_tokens = 0

    async def generate(self, request: GenRequest) -> GenOutput:
        place = len(self.sent)
        self.sent.append((request.text, "", True))
        output = await super().generate(request)
        self.sent[place] = (request.text, output.texts[0], True)
        self._count(output.metas)
        return output

    async def score(self, text: str, choices: Any, *, unconditional: bool) -> Scores:
        self.sent += [(text + choice, "", True) for choice in choices]
        scores = await super().score(text, choices, unconditional=unconditional)
        self._count(scores.metas)
        return scores

    async def cache_prefix(self, text: str) -> None:
        self.sent.append((text, "", False))
        await super().cache_prefix(text)

    def _count(self, metas: list[dict[str, Any]]) -> None:
        self.prompt_tokens += sum(meta["prompt_tokens"] for meta in metas)
        self.cached_tokens += sum(meta["cached_tokens"] for meta in metas)

    def best_share(self, encode: Any) -> float:
        """Of the prompt tokens, those that an earlier request had already brought; the last is always computed."""
        tree: dict[int, Any] = {}
        total = found = 0
        for text, output, counts in self.sent:
            ids = encode(text)
            node, length = tree, 0
            while length < len(ids) and ids[length] in node:
                node, length = node[ids[length]], length + 1
            total += len(ids) * counts
            found += min(length, len(ids) - 1) * counts
            node = tree
            for token in ids + encode(output):
                node = node.setdefault(token, {})
        return found / total


def share_of(recording: Recording, engine: sgl.Engine) -> tuple[float, float]:
    assert engine.tokenizer is not None
    return recording.cached_tokens / recording.prompt_tokens, recording.best_share(engine.tokenizer.encode)


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


@pytest.mark.parametrize(("fan_out", "depth"), [(2, 3), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_a_tree_of_thought_reuses_nearly_all_that_can_be(engine: sgl.Engine, fan_out: int, depth: int) -> None:
    example = load_example("tree_of_thought")
    engine.flush_cache()
    recording = Recording(engine)
    state = example.tree_of_thought.run("Share 12 apples.", fan_out, depth, 4, backend=recording, temperature=0)
    assert state["leaves"] == fan_out**depth
    reached, possible = share_of(recording, engine)
    assert reached >= possible - 0.02, (reached, possible)
