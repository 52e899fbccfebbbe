"""The data sets of `bough bench serving`: made up or read from a file, and the same for the same seed.

Text is made of common English words, nearly all of them one token in any vocabulary, so that loads need no tokenizer;
with one (`--tokenizer`) prompts are cut to the exact number of tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from bough.bench.dataset_files import custom, sharegpt
from bough.bench.load import Conversation, Turn
from bough.core.errors import SettingsError
from bough.tokenizer.tokenizer import Tokenizer

COMMON = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
)
WORDS = COMMON.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """What the flags say about the load's content."""

    name: str
    path: str | None
    num_prompts: int
    seed: int
    input_len: int
    output_len: int
    range_ratio: float  # lengths are drawn between this share of the full length and all of it
    fixed_output_len: int | None  # instead of the lengths in a file
    groups: int
    prompts_per_group: int
    system_prompt_len: int
    question_len: int
    group_output_len: int
    turns: int
    largest_token: int


class Writer:
    """Draws texts of a given number of tokens."""

    def __init__(self, draw: random.Random, tokenizer: Tokenizer | None) -> None:
        self._draw = draw
        self._tokenizer = tokenizer

    def text(self, tokens: int) -> str:
        words = " ".join(self._draw.choices(WORDS, k=tokens))
        if self._tokenizer is None:
            return words
        return self._tokenizer.decode(self._tokenizer.encode_batch([words])[0][:tokens])


def make_dataset(options: DataOptions, tokenizer: Tokenizer | None = None) -> list[Conversation]:
    """The conversations of a load, in the order of their arrival."""
    draw = random.Random(options.seed)
    conversations = DATASETS[options.name](options, draw, tokenizer)
    if not conversations:
        raise SettingsError(f"The data set {options.name} gives no prompts; nothing in its file can be used.")
    return conversations


def _random(options: DataOptions, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    writer = Writer(draw, tokenizer)
    lengths = [_lengths(options, draw) for _ in range(options.num_prompts)]
    return [_single(writer.text(length), length, output) for length, output in lengths]


def _random_ids(options: DataOptions, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    lengths = [_lengths(options, draw) for _ in range(options.num_prompts)]
    return [_single(_ids(options, draw, length), length, output) for length, output in lengths]


def _shared_prefix(options: DataOptions, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    """Groups of prompts that begin alike, shuffled: what a prefix cache is for."""
    writer = Writer(draw, tokenizer)
    length = options.system_prompt_len + options.question_len
    conversations = []
    for _ in range(options.groups):
        system = writer.text(options.system_prompt_len)
        questions = [writer.text(options.question_len) for _ in range(options.prompts_per_group)]
        conversations += [_single(f"{system}\n\n{each}", length, options.group_output_len) for each in questions]
    draw.shuffle(conversations)
    return conversations


def _multi_turn(options: DataOptions, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    """Users who talk on: each turn carries the whole history. All of them begin with the same system prompt."""
    writer = Writer(draw, tokenizer)
    system = writer.text(options.system_prompt_len)
    conversations = []
    for _ in range(options.num_prompts):
        turns: list[Turn] = []
        known = options.system_prompt_len
        for number in range(options.turns):
            length, output = _lengths(options, draw)
            text = writer.text(length)
            turns.append(Turn(f"{system}\n\n{text}" if number == 0 else f"\n\n{text}", output, known + length))
            known += length + output
        conversations.append(Conversation(tuple(turns)))
    return conversations


def _sharegpt(options: DataOptions, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    found = sharegpt(_path(options), _counter(tokenizer), options.fixed_output_len)
    return draw.sample(found, min(options.num_prompts, len(found)))


def _custom(options: DataOptions, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    return custom(_path(options), _counter(tokenizer), options.fixed_output_len or options.output_len)[
        : options.num_prompts
    ]


DATASETS: dict[str, Callable[[DataOptions, random.Random, Tokenizer | None], list[Conversation]]] = {
    "random": _random,
    "random-ids": _random_ids,
    "generated-shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
    "sharegpt": _sharegpt,
    "custom": _custom,
}


def _single(prompt: str | list[int], length: int, output: int) -> Conversation:
    return Conversation((Turn(prompt, output, length),))


def _ids(options: DataOptions, draw: random.Random, count: int) -> list[int]:
    return [draw.randint(0, options.largest_token) for _ in range(count)]


def _lengths(options: DataOptions, draw: random.Random) -> tuple[int, int]:
    """Of one prompt and its answer."""

    def between(full: int) -> int:
        return draw.randint(max(1, int(full * options.range_ratio)), full)

    return between(options.input_len), between(options.output_len)


def _path(options: DataOptions) -> str:
    if options.path is None:
        raise SettingsError(f"The data set {options.name} is a file: give it with --dataset-path.")
    return options.path


def _counter(tokenizer: Tokenizer | None) -> Callable[[str], int]:
    """Tokens of a text; without a tokenizer about four characters count as one."""
    if tokenizer is None:
        return lambda text: max(1, len(text) // 4)
    return lambda text: len(tokenizer.encode_batch([text])[0])
