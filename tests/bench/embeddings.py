"""`bough bench embeddings`: texts of mixed length to vectors, all in one call.

Texts have 2 to 100 words, most of them few, by a seed. With --beside-sentence-transformers that package, if it is
installed, encodes the same texts on the same machine, before and not at the same time.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from bough.bench.metrics import shown
from bough.core.errors import SettingsError
from bough.core.setting_checks import require_counts

SHORTEST, LONGEST = 2, 100  # words
WORDS = re.findall(
    r"\w+", "the a of river green when under light seven walks slowly house because music never paper cold morning"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--num-texts", type=int, default=1000)
    load.add_argument("--repeat", type=int, default=1, help="runs of the load; the best counts")
    load.add_argument("--seed", type=int, default=0)
    load.add_argument("--beside-sentence-transformers", action="store_true", help="measure that package, too")
    load.add_argument("--json", action="store_true", help="print one JSON object per run")


def main(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    require_counts(args, ("num_texts", "repeat"))
    texts = mixed_texts(args.num_texts, args.seed)
    if args.beside_sentence_transformers:
        _print(args, "sentence-transformers", _best(args.repeat, texts, _their_encoder(settings)))
    from bough.launch.engine import Engine

    with Engine(**settings) as engine:
        engine.encode(texts[:32])
        result = _best(args.repeat, texts, engine.encode)
        tokens = sum(output["meta_info"]["prompt_tokens"] for output in engine.encode(texts))
    _print(args, "bough", {**result, "tokens_per_s": tokens / result["duration_s"]})
    return 0


def mixed_texts(count: int, seed: int = 0) -> list[str]:
    """Lengths fall off as those of sentences and paragraphs do."""
    r = random.Random(seed)
    lengths = [min(LONGEST, SHORTEST + int(r.expovariate(1 / 20))) for _ in range(count)]
    return [" ".join(r.choices(WORDS, k=length)) for length in lengths]


def _best(repeat: int, texts: Sequence[str], encode: Callable[[list[str]], Any]) -> dict[str, float]:
    durations = []
    for _ in range(repeat):
        began = time.perf_counter()
        encode(list(texts))
        durations.append(time.perf_counter() - began)
    return {"texts": len(texts), "duration_s": min(durations), "texts_per_s": len(texts) / min(durations)}


def _their_encoder(settings: dict[str, Any]) -> Callable[[list[str]], Any]:
    try:
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]
    except ImportError as error:
        raise SettingsError(f"--beside-sentence-transformers needs that package ({error}).") from None
    from bough.core.settings import Settings
    from bough.loader.locate import find_files

    folder = find_files(Settings.from_flat(settings).model).folder
    model = SentenceTransformer(str(folder), device="cpu")
    model.encode(WORDS)
    return lambda texts: model.encode(texts)


def _print(args: argparse.Namespace, run: str, result: dict[str, float]) -> None:
    if args.json:
        print(json.dumps({"run": run, **result}))
    else:
        print(f"{run}: " + ", ".join(f"{name.replace('_', ' ')} {shown(value)}" for name, value in result.items()))
