"""`bough bench perplexity` over an engine that knows its own mind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bough.core.errors import SettingsError
from tests.bench import perplexity
from tests.bench.perplexity import Quality, Sample, as_text, best_tokens_agree, common_beginnings


class CountingEngine:
    """Finds every token half as likely as not, and thinks that each number is followed by the next one."""

    def generate(
        self,
        prompt: str | None = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        logprob_start_len: int = 0,
        **options: Any,
    ) -> Any:
        if input_ids is not None and isinstance(input_ids[0], list):
            pairs = zip(input_ids, sampling_params, strict=True)
            return [{"output_ids": [ids[-1] + 1 + i for i in range(p["max_new_tokens"])]} for ids, p in pairs]
        ids = input_ids if input_ids is not None else list(range(len((prompt or "").split())))
        places = range(logprob_start_len, len(ids))
        first = logprob_start_len
        return {
            "meta_info": {
                "input_token_logprobs": [(None if i == first else math.log(0.5), ids[i], None) for i in places],
                "input_top_logprobs": [None if i == first else [(-0.1, ids[i - 1] + 1, None)] for i in places],
            }
        }


def test_perplexity_is_the_inverse_geometric_mean() -> None:
    logprobs = perplexity.text_logprobs(CountingEngine(), "four words of text")
    assert len(logprobs) == 3
    assert perplexity.perplexity_of(logprobs) == pytest.approx(2.0)
    with pytest.raises(SettingsError, match="fewer than two tokens"):
        perplexity.perplexity_of([])


def test_agreement_forced_and_free() -> None:
    sample = Sample(prompt=[1, 2], output=[3, 4, 9, 10])
    assert best_tokens_agree(CountingEngine(), sample) == [True, True, False, True]
    assert common_beginnings(CountingEngine(), [sample, Sample([5], [6, 7])]) == [2, 2]


def test_the_report_compares_with_the_reference() -> None:
    text = as_text([("none", Quality(9, 20.0, 1.0, 4, 64.0)), ("auto", Quality(9, 20.1, 0.975, 2, 40.5))], 4)
    assert "ratio                     1.0050" in text
    assert "--quantization auto   best token 97.50%; left to itself 2 of 4 alike to the end, the first 40.5" in text


def test_the_fixed_text_comes_with_the_package_and_files_are_checked(tmp_path: Path) -> None:
    assert perplexity.read_text(None).startswith("The Ferry at Low Water\n")
    for read in (perplexity.read_text, perplexity.read_golden):
        with pytest.raises(SettingsError, match="missing cannot be read"):
            read(str(tmp_path / "missing"))
