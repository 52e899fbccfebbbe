"""The golden file: what `transformers` generates greedily from the default model in fp32, written down once.

Prompts and outputs are token ids, so that no tokenizer is under test. `make_golden` writes the file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("golden_smollm2.json")
PROMPT_COUNT = 32
NEW_TOKENS = 64
# Smallest accepted distance between the best and the second-best logit of any step. Adding up in another
# order moves it by about 2e-5, so nothing but a defect can change the choice.
SMALLEST_GAP = 2e-3


@dataclass(frozen=True)
class Sample:
    """One prompt and its continuation."""

    name: str
    gap: float  # the smallest distance between the best and the second-best logit on the way
    prompt: list[int]
    output: list[int]


@dataclass(frozen=True)
class Golden:
    """All samples, and what they were made with."""

    made: dict[str, str]
    samples: list[Sample]


def read(path: Path = PATH) -> Golden:
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Golden(raw["made"], [Sample(**sample) for sample in raw["samples"]])


def write(golden: Golden, path: Path = PATH) -> None:
    """One sample to a line: small, and a change shows in a diff."""
    lines = ",\n".join(json.dumps(asdict(sample), separators=(",", ":")) for sample in golden.samples)
    path.write_text(f'{{"made": {json.dumps(golden.made)},\n"samples": [\n{lines}\n]}}\n', encoding="utf-8")
