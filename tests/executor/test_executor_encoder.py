"""What encoders are given and what becomes of their output, on an encoder of a few lines; each rank has one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from bough.core.media import Feature
from bough.core.model_config import MediaConfig
from bough.core.plan import BatchPlan, Encode
from bough.executor.encoder import Encoder
from bough.executor.layout import StepLayout
from bough.executor.plain_plans import decode_plan
from tests.executor.test_executor_ranks import with_ranks
from tests.fakes.scheduler_bench import Bench
from tests.parity.test_media import make, text


class Doubling(torch.nn.Module):
    """Gives twice what it gets, in a list of what came of each item."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.calls: list[int] = []

    def get_image_features(self, pixel_values: torch.Tensor) -> Any:
        self.calls.append(len(pixel_values))
        if (pixel_values > 50).any():
            raise ValueError("too bright")
        return SimpleNamespace(pooler_output=list(2 * pixel_values))


def item(folder: Path, number: int, rows: int, value: float) -> Encode:
    path = folder / str(number)
    path.write_bytes(b"pad!" + np.full((1, rows, 2), value, dtype=np.float32).tobytes())
    return Encode(number, "image", rows, (Feature("pixel_values", "float32", (1, rows, 2), 4),), str(path))


def plan(runs: list[list[int]], **fields: Any) -> tuple[BatchPlan, StepLayout]:
    """A decode, and a chunk of ten tokens behind it."""
    media = np.array(runs, dtype=np.int32) if runs else None
    lens = {"query_lens": np.array([1, 10], dtype=np.int32), "given": np.array([0, 10], dtype=np.int32)}
    layout = SimpleNamespace(query_starts=np.array([0, 1, 11], dtype=np.int32))
    return replace(decode_plan(0, 2), **lens, media=media, **fields), cast(StepLayout, layout)


def test_items_alike_are_computed_together_and_stand_in_their_places(tmp_path: Path) -> None:
    model = Doubling()
    encoder = Encoder(model, 2, MediaConfig("", 0))
    encodes = (item(tmp_path, 1, 3, 1.0), item(tmp_path, 2, 4, 2.0), item(tmp_path, 3, 3, 3.0))
    found = encoder.run(*plan([[0, 3, 1, 2], [5, 2, 0, 1]], encodes=encodes))
    assert sorted(model.calls) == [1, 2]
    assert found is not None and found.here.flatten().nonzero().flatten().tolist() == [1, 2, 6]
    assert found.rows.shape == (1, 11, 2) and found.rows[0, [1, 2, 6], 0].tolist() == [6.0, 6.0, 4.0]
    assert encoder.run(*plan([], dropped=(1,))) is None
    with pytest.raises(KeyError):
        encoder.run(*plan([[0, 1, 0, 1]]))
    assert encoder.both_ways(*plan([[0, 3, 1, 2]])) is None
    both_ways = Encoder(model, 2, MediaConfig("", 0, whole=True)).both_ways(*plan([[0, 3, 1, 2]]))
    assert both_ways is not None and both_ways.tolist() == [[1, 2]]


def test_what_an_encoder_cannot_do_concerns_one_item(tmp_path: Path) -> None:
    encoder = Encoder(Doubling(), 2, MediaConfig("", 0))
    wrong, gone = replace(item(tmp_path, 4, 3, 1.0), rows=2), replace(item(tmp_path, 5, 3, 1.0), file="nowhere")
    encodes = (item(tmp_path, 1, 3, 1.0), item(tmp_path, 2, 3, 99.0), wrong, gone)
    found = encoder.run(*plan([[place, number, 0, 1] for place, number in enumerate((1, 2, 4, 5))], encodes=encodes))
    assert found is not None and found.rows[0, 1:5].isnan().all(1).tolist() == [False, True, True, True]
    assert sorted(encoder.take_failed()) == [2, 4, 5] and not encoder.take_failed()


class Squeezing(Doubling):
    """Loses the only row there is, as Mistral 3 of Transformers does."""

    def get_image_features(self, pixel_values: torch.Tensor) -> Any:
        rows = (2 * pixel_values).flatten(0, 1).squeeze(0)
        return SimpleNamespace(pooler_output=torch.split(rows, [pixel_values.shape[1]] * len(pixel_values)))


def test_an_item_of_a_single_row_is_computed_alone_as_well(tmp_path: Path) -> None:
    encoder = Encoder(Squeezing(), 2, MediaConfig("", 0))
    found = encoder.run(
        *plan([[0, 1, 0, 1], [1, 2, 1, 2]], encodes=(item(tmp_path, 1, 1, 4.0), item(tmp_path, 2, 3, 5.0)))
    )
    assert found is not None and found.rows[0, 1:4, 0].tolist() == [8.0, 10.0, 10.0] and not encoder.take_failed()


@pytest.mark.slow
def test_two_ranks_see_the_same(tmp_path: Path) -> None:
    model = make("qwen3_vl", tmp_path)
    ids, spans = model.prompt(text(9, 1), model.case.images)
    tokens, media = model.media(tmp_path, ids, spans, model.case.images)

    def ask(executor: Any) -> list[int]:
        bench = Bench(executor)
        bench.ask(0, tokens, max_new_tokens=3, temperature=0.0, ignore_eos=True, media=media)
        bench.run()
        return bench.out.outputs[0]

    found = with_ranks(tmp_path, 2, ask, context_length=128, max_total_tokens=200, page_size=1)
    assert found == model.continued(ids, model.case.images)[0][:3]
