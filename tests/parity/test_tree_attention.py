"""Reading a shared prefix once changes nothing of what requests say: on a CPU to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

import bough as sgl
from tests.fakes.examples import NAMES, load_example
from tests.parity.engines import fp32_engine

RULES = "You are a helpful guide in a museum of science. Answer in one sentence. " * 12
BOOK = "The catalogue says: the telescope was built in 1672 by an unknown maker in Delft, of brass and oak. " * 8
QUESTIONS = ["Who built it?", "When?", "Of what?", "Where?", "Why?", "How old is it?"]
PROMPTS = [RULES + part + question for part in ("", BOOK) for question in QUESTIONS]


@sgl.function
def guide(s: Any) -> None:
    s += RULES + BOOK
    branches = s.fork(3)
    branches += lambda i: QUESTIONS[i]
    branches += sgl.gen("answer", max_tokens=12, temperature=0.0, ignore_eos=True)
    branches.join()


def answers(samples: int, **settings: Any) -> tuple[list[tuple[list[int], list[float]]], list[str], int]:
    """What requests say with their logprobs, whose prompts find in the cache what they share; what branches say; and
    the bytes that were saved. One of several samples is drawn by a seed."""
    greedy = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    with fp32_engine(device="cpu", random_seed=1, **settings) as engine:
        engine.generate(PROMPTS[-1], {**greedy, "max_new_tokens": 1})
        parameters = greedy if samples == 1 else {**greedy, "n": samples, "temperature": 0.8}
        found = engine.generate(PROMPTS, parameters, return_logprob=True)
        said = guide.run(backend=engine)["answer"]
        saved = engine.get_server_info()["internal_states"][0]["kv_shared_bytes"]
    assert len(found) == samples * len(PROMPTS)
    return [(a["output_ids"], [p[0] for p in a["meta_info"]["output_token_logprobs"]]) for a in found], said, saved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "settings"),
    [(1, {}), (2, {"chunked_prefill_size": 56}), (1, {"page_size": 16, "kv_cache_dtype": "bfloat16"})],
)
def test_the_default_model_says_the_same_with_its_logprobs(samples: int, settings: dict[str, Any]) -> None:
    together, branches, saved = answers(samples, **settings)
    alone, other_branches, none = answers(samples, disable_tree_attention=True, **settings)
    assert together == alone and branches == other_branches
    assert saved > 0 == none


def programs(**settings: Any) -> dict[str, object]:
    """What the examples of the language return, all on one engine, each with an empty cache."""
    with fp32_engine(device="cpu", random_seed=1, **settings) as engine:
        sgl.set_default_backend(engine)
        found = {}
        for name in NAMES:
            engine.flush_cache()
            found[name] = load_example(name).main()
    return found


@pytest.mark.long
def test_programs_say_the_same() -> None:
    assert programs() == programs(disable_tree_attention=True)
