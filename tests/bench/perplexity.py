"""`bough bench perplexity`: the quality of quantised weights, against the same model in float32.

With `--golden`, a file of prompts with reference continuations, it also shows how often the best token is the
reference's.
"""

import argparse
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from bough.core.errors import SettingsError

TEXT = "data/perplexity.txt"
REFERENCE: dict[str, Any] = {"quantization": "none", "dtype": "float32"}


class Sample(msgspec.Struct, frozen=True):
    """A prompt and its reference continuation, as token ids."""

    prompt: list[int]
    output: list[int]


class GoldenFile(msgspec.Struct, frozen=True):
    samples: list[Sample]


class Quality(msgspec.Struct, frozen=True):
    tokens: int
    perplexity: float
    best_agrees: float | None = None  # share of reference tokens that are the best after the reference before them
    run_alike: int | None = None  # samples whose free continuation is the reference to its end
    alike_tokens: float | None = None  # mean length of the common beginning of free continuations


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--text", metavar="FILE", help="text to read instead of the one that comes with Bough")
    load.add_argument("--golden", metavar="FILE", help="JSON with samples of prompt and output ids, to compare with")
    load.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    text = read_text(args.text)
    samples = read_golden(args.golden) if args.golden is not None else []
    given = settings.get("quantization", "auto")
    reference = measure({**settings, **REFERENCE}, text, samples)
    asked = measure({**settings, "quantization": given}, text, samples)
    runs = [("none", reference), (given, asked)]
    if args.json:
        print(json.dumps([{"quantization": name, **msgspec.to_builtins(quality)} for name, quality in runs]))
    else:
        print(as_text(runs, len(samples)))
    return 0


def read_text(path: str | None) -> str:
    if path is None:
        return resources.files("bough.bench").joinpath(TEXT).read_text(encoding="utf-8")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--text {path} cannot be read: {error}.") from None


def read_golden(path: str) -> list[Sample]:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=GoldenFile).samples
    except (OSError, msgspec.DecodeError) as error:
        raise SettingsError(f"--golden {path} cannot be read: {error}.") from None


def measure(settings: dict[str, Any], text: str, samples: Sequence[Sample]) -> Quality:
    from bough.launch.engine import Engine

    with Engine(**settings) as engine:
        logprobs = text_logprobs(engine, text)
        quality = Quality(len(logprobs), perplexity_of(logprobs))
        if not samples:
            return quality
        forced = [share for sample in samples for share in best_tokens_agree(engine, sample)]
        starts = common_beginnings(engine, samples)
    return msgspec.structs.replace(
        quality,
        best_agrees=sum(forced) / len(forced),
        run_alike=sum(start == len(sample.output) for start, sample in zip(starts, samples, strict=True)),
        alike_tokens=sum(starts) / len(starts),
    )


def perplexity_of(logprobs: Sequence[float]) -> float:
    if not logprobs:
        raise SettingsError("The text has fewer than two tokens; --text must be longer.")
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def text_logprobs(engine: Any, text: str) -> list[float]:
    """Of every token but the first."""
    output = engine.generate(text, {"max_new_tokens": 1, "temperature": 0}, return_logprob=True, logprob_start_len=0)
    found = [logprob for logprob, _, _ in output["meta_info"]["input_token_logprobs"][1:]]
    if any(logprob is None for logprob in found):
        raise SettingsError("The model finds a token of the text impossible: its logits are not finite.")
    return found


def best_tokens_agree(engine: Any, sample: Sample) -> list[bool]:
    output = engine.generate(
        input_ids=sample.prompt + sample.output,
        sampling_params={"max_new_tokens": 1, "temperature": 0},
        return_logprob=True,
        logprob_start_len=len(sample.prompt) - 1,
        top_logprobs_num=1,
    )
    best = [entries[0][1] for entries in output["meta_info"]["input_top_logprobs"] if entries]
    return [ours == theirs for ours, theirs in zip(best[-len(sample.output) :], sample.output, strict=True)]


def common_beginnings(engine: Any, samples: Sequence[Sample]) -> list[int]:
    """How far each greedy continuation agrees with the reference."""
    greedy = [{"max_new_tokens": len(s.output), "temperature": 0, "ignore_eos": True} for s in samples]
    outputs = engine.generate(input_ids=[sample.prompt for sample in samples], sampling_params=greedy)
    starts = []
    for output, sample in zip(outputs, samples, strict=True):
        pairs = enumerate(zip(output["output_ids"], sample.output, strict=True))
        starts.append(next((i for i, (ours, theirs) in pairs if ours != theirs), len(sample.output)))
    return starts


def as_text(runs: Sequence[tuple[str, Quality]], samples: int) -> str:
    """The reference comes first."""
    (_, reference), (_, asked) = runs
    lines = [f"perplexity of {reference.tokens:,} tokens"]
    lines += [f"  --quantization {name:<6} {quality.perplexity:10.4f}" for name, quality in runs]
    lines.append(f"  ratio                 {asked.perplexity / reference.perplexity:10.4f}")
    if samples:
        lines.append(f"agreement with the reference over {samples} golden samples")
        lines += [
            f"  --quantization {name:<6} best token {quality.best_agrees:.2%}; left to itself {quality.run_alike} of "
            f"{samples} alike to the end, the first {quality.alike_tokens:.1f} tokens on average"
            for name, quality in runs
        ]
    return "\n".join(lines)
