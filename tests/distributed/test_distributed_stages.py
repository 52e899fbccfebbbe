"""Where a model is cut into stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bough.core.errors import SettingsError
from bough.core.model_config import IndexConfig, LatentConfig, ModelConfig, RecurrentConfig, RopeConfig
from bough.distributed.topology import Topology

PLAIN = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    intermediate_size=128,
    num_layers=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=1,
    context_length=128,
    norm_eps=1e-5,
    rope=RopeConfig(10000.0),
)
LAYER = PLAIN.layer_weights // PLAIN.hidden_size  # a vocabulary of so many tokens weighs as much as a layer


def sizes(config: ModelConfig, stages: int) -> list[int]:
    """Layers of each stage, which follow one another."""
    ranges = [Topology(pp_rank=stage, pp_size=stages).layers_of(config) for stage in range(stages)]
    assert [layer for stage in ranges for layer in stage] == list(range(config.num_layers))
    return [len(stage) for stage in ranges]


@pytest.mark.parametrize(
    ("vocab_size", "layers", "stages", "expected"),
    [
        (1, 32, 1, [32]),
        (1, 32, 4, [8, 8, 8, 8]),
        (LAYER, 32, 2, [16, 16]),
        (2 * LAYER, 32, 4, [7, 9, 9, 7]),  # the first has the embedding, the last the head
        (LAYER, 30, 4, [7, 8, 8, 7]),
        (9 * LAYER, 6, 3, [1, 4, 1]),  # no stage is without a layer
        (9 * LAYER, 4, 4, [1, 1, 1, 1]),
    ],
)
def test_stages_are_balanced(vocab_size: int, layers: int, stages: int, expected: list[int]) -> None:
    assert sizes(replace(PLAIN, vocab_size=vocab_size, num_layers=layers), stages) == expected


def test_layers_that_share_keys_and_values_stay_together() -> None:
    """The last ten read those of layers 20 and 21."""
    sliding = tuple(layer % 2 == 0 for layer in range(32))
    config = replace(PLAIN, sliding_window=8, sliding_layers=sliding, shared_kv_layers=10)
    assert sizes(config, 2) == [16, 16]
    assert sizes(config, 3) == [11, 9, 12]
    assert sizes(replace(config, shared_kv_layers=24), 2) == [6, 26]


def test_layers_that_take_the_choice_of_another_stay_with_it() -> None:
    index = IndexConfig(2, 8, 4, layers=tuple(layer % 5 == 0 for layer in range(32)))
    config = replace(PLAIN, latent=LatentConfig(8, 4, 8, 8, index=index))
    assert sizes(config, 2) == [15, 17]
    with pytest.raises(SettingsError, match="--pp-size 8: the 32 layers of this model make 7 stages at most"):
        sizes(config, 8)


def test_layers_with_inputs_from_the_embedding_are_not_cut() -> None:
    with pytest.raises(SettingsError, match="make 1 stages at most"):
        sizes(replace(PLAIN, layer_inputs=8), 2)


def test_ranks_of_a_stage_have_numbers_in_a_row() -> None:
    places = [Topology.at(rank, 2, 3) for rank in range(6)]
    assert [(place.pp_rank, place.tp_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [place.rank for place in places] == list(range(6)) and {place.ranks for place in places} == {6}
    assert [(place.is_first, place.is_last) for place in places[::2]] == [(True, False), (False, False), (False, True)]


def test_a_stage_keeps_the_states_of_its_layers() -> None:
    recurrent = RecurrentConfig((True, False, True, False), 2, 8, 4)
    config = replace(PLAIN, num_layers=4, recurrent=recurrent)
    kept = [Topology(pp_rank=stage, pp_size=2).states_of(config) for stage in range(2)]
    assert [states.layers for states in kept if states] == [(True, False, False, False), (False, False, True, False)]
    assert Topology(pp_size=2).states_of(PLAIN) is None
