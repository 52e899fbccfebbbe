"""`bough train-draft`: a draft head (EAGLE-3) for a model, made from texts that the model itself writes.

The engine writes the texts first and ends; then the model is loaded by transformers, and the head learns from it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bough.cli.commands import Parser
from bough.cli.flags import add_engine_flags, given_settings
from bough.cli.generate import DEFAULTS, encode_chat, running
from bough.core.errors import SettingsError
from bough.core.setting_checks import require_counts
from bough.core.settings import Settings

if TYPE_CHECKING:
    from bough.launch.engine import Engine

TEMPERATURE = 0.8  # texts that differ, and are likely
AT_ONCE = 2048  # texts
WORDS = Path(__file__).parent.parent / "bench/data/perplexity.txt"
TASKS = ["Explain this", "Write a story in which this happens", "Say this in other words", "List five facts about this"]
TASKS += ["Write a Python function for this", "Tell me as JSON what this is about", "Continue this text"]


def run(argv: Sequence[str]) -> int:
    parser = Parser(program="bough train-draft", usage="[MODEL] --output DIR", about="Trains an EAGLE-3 draft head.")
    parser.add_argument("trained", nargs="?", metavar="MODEL", help="as --model-path; without one, the default model")
    parser.add_flags()
    add_engine_flags(parser, DEFAULTS)
    args = parser.parse(argv)
    require_counts(args, ("num_texts", "length", "steps", "batch_size", "draft_vocab_size"))
    given = given_settings(args) | ({} if args.trained is None else {"model_path": args.trained})
    settings, kept = Settings.from_flat(given), args.texts is not None and Path(args.texts).exists()
    lines = _lines(args.texts if kept else args.prompts) if kept or args.prompts else _prompts(args.num_texts)
    try:  # before work of hours
        for folder in (Path(args.output), *([] if args.texts is None else [Path(args.texts).parent])):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--output or --texts: {error}.") from None
    if not kept:
        with running(given) as engine:
            lines = _write_texts(engine, [lines[i % len(lines)] for i in range(args.num_texts)], args.length)
        if args.texts is not None:
            Path(args.texts).write_text("\n".join(lines))
    from bough.loader.locate import find_files
    from bough.training.eagle3 import Text, load_model, train

    files = find_files(settings.model)
    texts = [Text(*json.loads(line)) for line in lines]
    model = load_model(files.folder, files.gguf, settings.model.device)
    size = {"vocabulary": args.draft_vocab_size, "steps": args.steps, "batch_size": args.batch_size}
    train(model, texts, **size, rate=args.learning_rate)[0].save(Path(args.output))
    print(f"wrote {args.output}")
    return 0


def _lines(path: str) -> list[str]:
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"Cannot read {path}: {error}.") from None
    if not lines:
        raise SettingsError(f"{path} is empty; write a prompt on each line.")
    return lines


def _prompts(count: int) -> list[str]:
    words, draw = WORDS.read_text(encoding="utf-8").split(), random.Random(0)
    starts = [draw.randrange(len(words)) for _ in range(count)]
    return [f"{draw.choice(TASKS)}: {' '.join(words[at : at + draw.randint(1, 40)])}" for at in starts]


def _write_texts(engine: Engine, prompts: Sequence[str], length: int) -> list[str]:
    """As JSON: the token ids, and how many of them are the prompt's."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise SettingsError("This model has no tokenizer, so it cannot write texts to learn from.")
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts] if tokenizer.chat_template else []
    asked = [encode_chat(tokenizer, chat) for chat in chats] or [tokenizer.encode(prompt) for prompt in prompts]
    texts, sampling = list[str](), {"temperature": TEMPERATURE, "max_new_tokens": length}
    for first in range(0, len(asked), AT_ONCE):
        ids = asked[first : first + AT_ONCE]
        found = engine.generate(input_ids=ids, sampling_params=sampling)
        texts += [json.dumps((i + output["output_ids"], len(i))) for i, output in zip(ids, found, strict=True)]
        print(f"{len(texts)} of {len(asked)} texts written", flush=True)
    return texts
