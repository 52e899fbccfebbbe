"""The data sets of `bough bench serving`, the same for the same seed.

Random text is made of common English words, nearly all of them one token, so no tokenizer is needed; with `--tokenizer`
prompts have the exact number of tokens.
"""

import argparse
import base64
import io
import json
import random
import re
from collections.abc import Callable
from typing import Any

from bough.bench.backends import Conversation, Prompt, Turn
from bough.core.errors import SettingsError
from bough.core.files import table_beside, user_path
from bough.tokenizer.tokenizer import Tokenizer

WORDS = table_beside(__file__, "words.toml")["common"].split()
Count = Callable[[str], int]
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048  # what SGLang's and vLLM's tools keep of ShareGPT


def make_dataset(options: argparse.Namespace, tokenizer: Tokenizer | None = None) -> list[Conversation]:
    """The conversations that the flags of `bough bench serving` ask for."""
    conversations = DATASETS[options.dataset_name](options, random.Random(options.seed), tokenizer)
    if not conversations:
        raise SettingsError(f"The data set {options.dataset_name} gives no prompts; nothing in its file can be used.")
    return conversations


def _random(options: argparse.Namespace, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    lengths = [_lengths(options, draw) for _ in range(options.num_prompts)]
    return [_single(_text(draw, tokenizer, length), length, output) for length, output in lengths]


def _random_ids(options: argparse.Namespace, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    lengths, largest = [_lengths(options, draw) for _ in range(options.num_prompts)], options.largest_token
    return [_single([draw.randint(0, largest) for _ in range(size)], size, output) for size, output in lengths]


def _shared_prefix(options: argparse.Namespace, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    """Groups of prompts that share a prefix, shuffled."""
    length = options.gsp_system_prompt_len + options.gsp_question_len
    conversations = []
    for _ in range(options.gsp_num_groups):
        system = _text(draw, tokenizer, options.gsp_system_prompt_len)
        questions = [_text(draw, tokenizer, options.gsp_question_len) for _ in range(options.gsp_prompts_per_group)]
        conversations += [_single(f"{system}\n\n{each}", length, options.gsp_output_len) for each in questions]
    draw.shuffle(conversations)
    return conversations


def _multi_turn(options: argparse.Namespace, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    """Each turn carries the whole history; all conversations share a system prompt."""
    system = _text(draw, tokenizer, options.gsp_system_prompt_len)
    conversations: list[Conversation] = []
    for _ in range(options.num_prompts):
        turns: list[Turn] = []
        known = options.gsp_system_prompt_len
        for number in range(options.num_turns):
            length, output = _lengths(options, draw)
            text = _text(draw, tokenizer, length)
            turns.append(Turn(f"{system}\n\n{text}" if number == 0 else f"\n\n{text}", output, known + length))
            known += length + output
        conversations.append(tuple(turns))
    return conversations


def _mixed(options: argparse.Namespace, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    """Short chats, and every eighth prompt as long as a system prompt: what delays whom."""
    lengths = [_lengths(options, draw) for _ in range(options.num_prompts)]
    sizes = [(options.gsp_system_prompt_len if i % 8 == 7 else n, output) for i, (n, output) in enumerate(lengths)]
    return [_single(_text(draw, tokenizer, length), length, output) for length, output in sizes]


def _image(options: argparse.Namespace, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    """Chats that begin with pictures of random pixels, of which there are `image_pool`, or as many as are shown."""
    shown = options.num_prompts * options.image_count
    pool = [_picture(options, draw) for _ in range(min(options.image_pool or shown, shown))]
    conversations: list[Conversation] = []
    for number in range(options.num_prompts):
        length, output = _lengths(options, draw)
        urls = [pool[i % len(pool)] for i in range(number * options.image_count, (number + 1) * options.image_count)]
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [*parts, {"type": "text", "text": _text(draw, tokenizer, length)}]
        conversations.append((Turn([{"role": "user", "content": content}], output, length),))
    return conversations


def _picture(options: argparse.Namespace, draw: random.Random) -> str:
    """A data URL."""
    size = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", options.image_resolution)
    if size is None:
        text = f"--image-resolution is a height and a width such as 336x336, not {options.image_resolution}."
        raise SettingsError(text)
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise SettingsError("Pillow is missing, which writes pictures; pip install 'bough[multimodal]'.") from None
    height, width, file = int(size[1]), int(size[2]), io.BytesIO()
    Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height)).save(file, options.image_format)
    return f"data:image/{options.image_format};base64,{base64.b64encode(file.getvalue()).decode()}"


def _sharegpt(options: argparse.Namespace, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    """The first questions of conversations in ShareGPT's JSON."""
    path, count, found = _path(options), _counter(tokenizer), []
    entries = _parse(_read(path), path)
    if not isinstance(entries, list):
        raise SettingsError(f"{path} is not a ShareGPT file: it must hold a JSON list of conversations.")
    for texts in map(_texts, entries):
        if len(texts) < 2:
            continue
        question, answer = count(texts[0]), count(texts[1])
        length = options.sharegpt_output_len or answer
        if question < MIN_TOKENS or answer < MIN_TOKENS or question > MAX_PROMPT or question + length > MAX_TOTAL:
            continue
        found.append(_single(texts[0], question, length))
    return draw.sample(found, min(options.num_prompts, len(found)))


def _custom(options: argparse.Namespace, draw: random.Random, tokenizer: Tokenizer | None) -> list[Conversation]:
    """JSON lines of one's own: "prompt" (text or ids), "messages", or ShareGPT's "conversations", and maybe
    "output_len"."""
    path, count, found = _path(options), _counter(tokenizer), []
    output_len = options.sharegpt_output_len or options.random_output_len
    for number, line in enumerate(_read(path).splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            found.append(_custom_entry(_parse(line, where), count, output_len, where))
    return found[: options.num_prompts]


DATASETS: dict[str, Callable[[argparse.Namespace, random.Random, Tokenizer | None], list[Conversation]]] = {
    "random": _random,
    "random-ids": _random_ids,
    "generated-shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
    "mixed": _mixed,
    "image": _image,
    "sharegpt": _sharegpt,
    "custom": _custom,
}


def _single(prompt: Prompt, length: int, output: int) -> Conversation:
    return (Turn(prompt, output, length),)


def _text(draw: random.Random, tokenizer: Tokenizer | None, tokens: int) -> str:
    words = " ".join(draw.choices(WORDS, k=tokens))
    return words if tokenizer is None else tokenizer.decode(tokenizer.encode_batch([words])[0][:tokens])


def _lengths(options: argparse.Namespace, draw: random.Random) -> tuple[int, int]:
    def between(full: int) -> int:
        return draw.randint(max(1, int(full * options.random_range_ratio)), full)

    return between(options.random_input_len), between(options.random_output_len)


def _path(options: argparse.Namespace) -> str:
    if options.dataset_path is None:
        raise SettingsError(f"The data set {options.dataset_name} is a file: give it with --dataset-path.")
    return str(options.dataset_path)


def _counter(tokenizer: Tokenizer | None) -> Count:
    """Counts the tokens of a text; without a tokenizer, four characters are one."""
    if tokenizer is None:
        return lambda text: max(1, len(text) // 4)
    return lambda text: len(tokenizer.encode_batch([text])[0])


# ---- what files hold


def _custom_entry(entry: Any, count: Count, output_len: int, where: str) -> Conversation:
    fields = entry if isinstance(entry, dict) else {}
    texts = _texts(fields)
    prompt: Prompt | None = fields.get("prompt") or fields.get("messages") or (texts[0] if texts else None)
    if not prompt or not isinstance(prompt, str | list):
        raise SettingsError(f"{where}: a request needs prompt (text or token ids), messages or conversations.")
    given = fields.get("output_len")
    if given is None and len(texts) > 1 and "prompt" not in fields:
        given = count(texts[1])
    length = output_len if given is None else given
    if not isinstance(length, int) or length < 1:
        raise SettingsError(f"{where}: output_len must be a whole number of at least 1, got {length!r}.")
    parts = [prompt] if isinstance(prompt, str) else prompt
    words = (str(part.get("content", "")) if isinstance(part, dict) else part for part in parts)
    return _single(prompt, sum(count(text) if isinstance(text, str) else 1 for text in words), length)


def _texts(entry: Any) -> list[str]:
    turns = entry.get("conversations") or entry.get("conversation") or () if isinstance(entry, dict) else ()
    texts = [turn.get("value", turn.get("content")) for turn in turns if isinstance(turn, dict)]
    return [text for text in texts if isinstance(text, str)]


def _read(path: str) -> str:
    try:
        return user_path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"Cannot read the data set {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not a data set: it is not UTF-8 text.") from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{where} is not valid JSON: {error}.") from None
