"""Logprobs against float64 log-softmax, for sampled tokens and for prompts in blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bough.core.plan import LogprobSpec
from bough.sampling import logprobs
from bough.sampling.logprobs import INPUT_BLOCK, output_logprobs, score_inputs


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("block", [1, 3, 256])
def test_output_logprobs_for_the_rows_that_ask(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "OUTPUT_BLOCK", block)
    logits, tokens = randn(5, 200) * 4, torch.tensor([3, 199, 0, 7, 50])
    exact = torch.log_softmax(logits.double(), -1).numpy()
    specs = [LogprobSpec(), None, LogprobSpec(top=4), LogprobSpec(top=2, ids=(9, 1, 9)), LogprobSpec(ids=(5, 200, -1))]
    found = output_logprobs(logits, tokens, specs).read()
    assert found[1] is None
    for place, spec in enumerate(specs):
        result = found[place]
        if spec is None or result is None:
            continue
        assert result.tokens.tolist() == [int(tokens[place])]
        assert result.logprobs[0] == pytest.approx(exact[place, tokens[place]], abs=1e-5)
        best = np.argsort(-exact[place])[: spec.top]
        assert result.top_ids.tolist() == [best.tolist()]
        assert result.top_logprobs[0] == pytest.approx(exact[place, best], abs=1e-5)
        expected = [exact[place, token] if 0 <= token < 200 else -np.inf for token in spec.ids]
        assert result.id_logprobs[0] == pytest.approx(np.array(expected), abs=1e-5)
        assert {array.dtype.name for array in (result.tokens, result.top_ids)} == {"int32"}
        floats = (result.logprobs, result.top_logprobs, result.id_logprobs)
        assert {array.dtype.name for array in floats} == {"float32"}


def test_nothing_is_computed_for_nobody() -> None:
    pending = output_logprobs(randn(2, 10), torch.tensor([0, 1]), [None, None])
    assert pending.scores is None
    assert pending.read() == [None, None]


def test_large_and_masked_logits() -> None:
    logits = torch.tensor([[1e4, 1e4, -torch.inf]])
    [result] = output_logprobs(logits, torch.tensor([1]), [LogprobSpec(top=3)]).read()
    assert result is not None
    assert result.logprobs[0] == pytest.approx(-np.log(2))
    assert result.top_logprobs[0, 2] == -np.inf


def test_more_tops_than_tokens() -> None:
    [result] = output_logprobs(randn(1, 3), torch.tensor([1]), [LogprobSpec(top=10)]).read()
    assert result is not None
    assert result.top_ids.shape == (1, 3)


@pytest.mark.parametrize("length", [1, INPUT_BLOCK, INPUT_BLOCK + 1, 2 * INPUT_BLOCK + 37])
def test_input_logprobs_in_bounded_blocks(length: int) -> None:
    hidden, head = randn(length, 16), randn(16, 90)
    targets = torch.arange(length) % 90
    sizes: list[int] = []

    def logits_of(block: Tensor) -> Tensor:
        sizes.append(len(block))
        return block @ head

    spec = LogprobSpec(top=3, ids=(4, 8))
    result = score_inputs(logits_of, hidden, targets, spec).to_host()
    exact = torch.log_softmax((hidden.double() @ head.double()), -1)
    assert max(sizes) <= INPUT_BLOCK
    assert sum(sizes) == length
    assert result.tokens.tolist() == targets.tolist()
    np.testing.assert_allclose(result.logprobs, exact.gather(1, targets[:, None]).squeeze(1), atol=1e-4)
    np.testing.assert_allclose(result.top_logprobs, exact.topk(3).values, atol=1e-4)
    assert result.top_ids.tolist() == exact.topk(3).indices.tolist()
    np.testing.assert_allclose(result.id_logprobs, exact[:, [4, 8]], atol=1e-4)


def test_input_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="3 hidden states for 2 targets"):
        score_inputs(lambda block: block, torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), LogprobSpec())
