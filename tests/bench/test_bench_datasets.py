"""Data sets: the same for the same seed, of the asked shape, and files that say what is wrong with them."""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
from pathlib import Path

import pytest
from PIL import Image

from bough.bench.backends import Conversation, Turn
from bough.bench.datasets import make_dataset
from bough.bench.driver import poisson_arrivals
from bough.core.errors import SettingsError
from tests.fakes.scripted_engine import byte_level_tokenizer

OPTIONS = {
    "dataset_name": "random",
    "dataset_path": None,
    "num_prompts": 20,
    "seed": 3,
    "random_input_len": 40,
    "random_output_len": 10,
    "random_range_ratio": 0.5,
    "sharegpt_output_len": None,
    "gsp_num_groups": 3,
    "gsp_prompts_per_group": 4,
    "gsp_system_prompt_len": 12,
    "gsp_question_len": 5,
    "gsp_output_len": 7,
    "num_turns": 3,
    "largest_token": 99,
    "image_count": 2,
    "image_resolution": "6x8",
    "image_format": "png",
    "image_pool": None,
}


def options(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**(OPTIONS | changes))


def single(conversation: Conversation) -> Turn:
    assert len(conversation) == 1
    return conversation[0]


@pytest.mark.parametrize("name", ["random", "random-ids", "generated-shared-prefix", "multi-turn", "image"])
def test_a_seed_fixes_the_load(name: str) -> None:
    assert make_dataset(options(dataset_name=name)) == make_dataset(options(dataset_name=name))
    assert make_dataset(options(dataset_name=name)) != make_dataset(options(dataset_name=name, seed=4))


def test_lengths_are_drawn_from_the_asked_range() -> None:
    turns = [single(each) for each in make_dataset(options(num_prompts=200, dataset_name="random-ids"))]
    assert {len(turn.prompt) for turn in turns} == set(range(20, 41))
    assert {turn.output_tokens for turn in turns} == set(range(5, 11))
    assert all(0 <= token <= 99 for turn in turns for token in turn.prompt)  # type: ignore[operator]
    full = [single(each) for each in make_dataset(options(random_range_ratio=1.0))]
    assert {(len(str(turn.prompt).split()), turn.output_tokens) for turn in full} == {(40, 10)}


def test_with_a_tokenizer_lengths_are_exact() -> None:
    tokenizer = byte_level_tokenizer()
    for each in make_dataset(options(), tokenizer):
        turn = single(each)
        assert len(tokenizer.encode(str(turn.prompt))) == turn.input_tokens


def pictures_of(conversation: Conversation) -> list[str]:
    content = single(conversation).prompt[0]["content"]  # type: ignore[index, call-overload]
    return [part["image_url"]["url"] for part in content if part["type"] == "image_url"]


def test_pictures_have_the_asked_size_and_come_again_as_often_as_asked() -> None:
    found = [pictures_of(each) for each in make_dataset(options(dataset_name="image"))]
    assert [len(urls) for urls in found] == [2] * 20 and len({url for urls in found for url in urls}) == 40
    with Image.open(io.BytesIO(base64.b64decode(found[0][0].partition(",")[2]))) as picture:
        assert (picture.format, picture.height, picture.width) == ("PNG", 6, 8)
    few = [pictures_of(each) for each in make_dataset(options(dataset_name="image", image_pool=3))]
    assert len({url for urls in few for url in urls}) == 3 and few[0] == few[3] != few[1]
    with pytest.raises(SettingsError, match="such as 336x336, not large"):
        make_dataset(options(dataset_name="image", image_resolution="large"))


def test_groups_share_their_beginning_and_nothing_else() -> None:
    prompts = [str(single(each).prompt) for each in make_dataset(options(dataset_name="generated-shared-prefix"))]
    beginnings = [prompt.split("\n\n")[0] for prompt in prompts]
    assert len(prompts) == 12 and len(set(prompts)) == 12
    assert sorted(beginnings.count(each) for each in set(beginnings)) == [4, 4, 4]
    assert beginnings != sorted(beginnings), "groups are shuffled"


def test_a_conversation_counts_its_history() -> None:
    first = make_dataset(options(dataset_name="multi-turn", random_range_ratio=1.0))[0]
    assert [turn.input_tokens for turn in first] == [52, 52 + 10 + 40, 52 + 2 * 50]


def test_sharegpt_gives_first_questions_of_usable_length(tmp_path: Path) -> None:
    def entry(question: str, answer: str) -> dict[str, object]:
        return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}

    usable = [entry(f"What is {i} plus one?", "It is " * 10) for i in range(30)]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([*usable, entry("Hi", "Hello"), entry("x" * 9000, "y" * 90), {"conversations": []}]))
    turns = [single(each) for each in make_dataset(options(dataset_name="sharegpt", dataset_path=str(file)))]
    assert len(turns) == 20 and {turn.output_tokens for turn in turns} == {15}
    assert all(str(turn.prompt).startswith("What is") for turn in turns)
    fixed = make_dataset(
        options(dataset_name="sharegpt", dataset_path=str(file), sharegpt_output_len=8, num_prompts=99)
    )
    assert len(fixed) == 30 and single(fixed[0]).output_tokens == 8


def test_custom_lines_take_every_form(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    chat = [{"role": "user", "content": "Hello there"}]
    said = [{"content": "Who are you, then?"}, {"content": "twelve chars"}]
    lines = [{"prompt": "A text", "output_len": 3}, {"prompt": [5, 6, 7]}, {"messages": chat}, {"conversations": said}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    turns = [single(each) for each in make_dataset(options(dataset_name="custom", dataset_path=str(file)))]
    assert [turn.prompt for turn in turns] == ["A text", [5, 6, 7], chat, "Who are you, then?"]
    assert [turn.output_tokens for turn in turns] == [3, 10, 10, 3]
    assert turns[1].input_tokens == 3


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("sharegpt", "{}", "must hold a JSON list"),
        ("sharegpt", "[]", "gives no prompts"),
        ("sharegpt", "[", "is not valid JSON"),
        ("custom", '{"text": "x"}', "line 1: a request needs prompt"),
        ("custom", '{"prompt": "x", "output_len": 0}', "output_len must be a whole number of at least 1"),
        ("custom", '{"prompt": "x"}\n{', "line 2 is not valid JSON"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(name: str, content: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text(content)
    with pytest.raises(SettingsError, match=complaint):
        make_dataset(options(dataset_name=name, dataset_path=str(file)))
    with pytest.raises(SettingsError, match="Cannot read the data set"):
        make_dataset(options(dataset_name=name, dataset_path=str(tmp_path / "none")))


def test_arrivals_are_poisson_and_seeded() -> None:
    conversations = make_dataset(options(num_prompts=4000, random_input_len=1, random_output_len=1))
    arrivals = poisson_arrivals(conversations, 50.0, seed=1)
    assert arrivals == poisson_arrivals(conversations, 50.0, seed=1)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert 0.019 < mean < 0.021 and 0.35 < sum(gap > mean for gap in gaps) / len(gaps) < 0.39  # 1/e
    assert {each.at_s for each in poisson_arrivals(conversations, float("inf"), seed=1)} == {0.0}
