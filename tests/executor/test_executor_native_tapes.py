"""Which models the tapes compute, and what they say of others: nothing may be left out of a tape silently."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bough.core.model_config import IndexConfig, LatentConfig, ModelConfig, MoEConfig, RopeConfig
from bough.executor.native_recorder import NotRecordedError, Recorder, Recording
from bough.executor.native_tapes import why_not_recorded

LLAMA = ModelConfig("LlamaForCausalLM", 16, 24, 2, 2, 1, 8, 30, 64, 1e-5, RopeConfig(10000.0))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"qk_norm": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True, "tied_embeddings": True},
        {"unrotated_layers": (True, False), "attention_sinks": True},
        {"moe": MoEConfig(5, 2, 32, shared_size=16, shared_gate=True, dense_layers=(True, False))},
        {"rope": RopeConfig(10000.0, partial_rotary_factor=0.5, apart=True)},
        {"rope": RopeConfig(10000.0, sections=(1, 2, 1))},  # of a text all positions are alike
        {"norm": "layer", "norm_plus_one": True, "mlp": "plain", "activation": "relu2"},
        {"rope": RopeConfig(10000.0, partial_rotary_factor=0.5), "learned_positions": True},
        {"qk_norm": True, "qk_norm_whole": True, "query_growth": (0.1, 16, 0)},
        {"qk_norm": True, "qk_norm_last": True, "moe": MoEConfig(5, 2, 32, scores="sparsemixer")},
        {"logit_scale": 0.5, "head_bias": True},
        {"latent": LatentConfig(9, 4, 4, 5, query_rank=6)},
        {"attention_softcap": 5.0, "logit_softcap": 3.0, "sliding_window": 8, "sliding_layers": (True, False)},
    ],
)
def test_what_is_recorded(fields: dict[str, Any]) -> None:
    assert why_not_recorded(replace(LLAMA, **fields)) is None


@pytest.mark.parametrize(
    ("fields", "lacks"),
    [
        ({"sliding_window": 8, "sliding_layers": (True, True), "chunked": True}, "attention within chunks"),
        ({"shared_kv_layers": 1}, "index_select"),
        ({"moe": MoEConfig(5, 1, 32, scores="sigmoid", scales_inputs=True)}, "experts with scaled inputs"),
        ({"moe": MoEConfig(1025, 2, 32)}, "1025 experts"),
        ({"latent": LatentConfig(513, 64, 4, 5)}, "latents of 577 numbers"),
        ({"latent": LatentConfig(9, 4, 4, 5, query_rank=6, index=IndexConfig(3, 4, 8))}, "sparse attention"),
    ],
)
def test_what_is_not_recorded_is_named(fields: dict[str, Any], lacks: str) -> None:
    assert lacks in (why_not_recorded(replace(LLAMA, **fields)) or "")


@pytest.mark.parametrize(
    ("compute", "lacks"),
    [
        (lambda rows: rows.tanh(), "tanh"),
        (lambda rows: rows + 1.0, "add"),
        (lambda rows: rows * rows, "mul"),
        (lambda rows: rows.view(3, 2, 4).transpose(0, 1) + 1.0, "add"),
        (lambda rows: torch.empty(3, 8, device="meta") * 2.0, "numbers that are no rows"),
        # In place: rows that a tape reads later would not have changed.
        (lambda rows: rows.mul_(2.0), "mul_"),
        (lambda rows: rows.view(3, 2, 4).add_(rows.view(3, 2, 4)), "add_"),
        (lambda rows: rows.copy_(torch.ones(3, 8)), "copy_"),
        (lambda rows: operator.iadd(rows, torch.ones(8)), "add_"),
        (lambda rows: operator.setitem(rows, 0, 1.0), "__setitem__"),
        (lambda rows: torch._foreach_mul_([rows], 2.0), "_foreach_mul_"),
        (lambda rows: torch.nn.functional.silu(rows, inplace=True), "silu"),
        (lambda rows: torch.nn.functional.relu(rows, inplace=True), "relu"),
        (lambda rows: torch.mul(rows, 2.0, out=rows), "mul"),
        # By way of their memory, which torch's functions say nothing of.
        (lambda rows: rows.set_(torch.empty(3, 8, device="meta")), "set_"),
        (lambda rows: rows.set_(), "set_"),
        (lambda rows: rows.untyped_storage().fill_(0), "set_"),
        (lambda rows: rows.resize_(2, 8), "resize_"),
        (lambda rows: setattr(rows, "data", torch.empty(3, 8, device="meta")), "__set__"),
        (lambda rows: torch.empty(3, 8, out=rows), "resize_"),
        (lambda rows: torch.tanh(input=rows), "tanh"),
        (lambda rows: torch.cat([rows, rows]), "cat"),
    ],
)
def test_what_torch_would_compute_is_recorded_or_refused(compute: Callable[[torch.Tensor], Any], lacks: str) -> None:
    recorder = Recorder(tokens=3, logits=1)
    rows, weight = recorder.rows(8, on_logits=False), torch.ones(8)
    with Recording(recorder):
        assert recorder.place(rows * 2.0 + (weight + 1)).buffer.width == 8
        with pytest.raises(NotRecordedError, match=lacks):
            compute(rows)


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        (lambda weight: weight.add_(1.0), "add_"),
        (lambda weight: operator.setitem(weight, 0, 1.0), "copy_"),
        (lambda weight: torch.add(weight, 1.0, out=weight), "add"),
        (lambda weight: weight.set_(torch.zeros(8)), "set_"),
        (lambda weight: setattr(weight, "data", torch.zeros(8)), "__set__"),
    ],
)
def test_what_would_change_a_weight_with_each_step_is_refused(
    change: Callable[[torch.Tensor], Any], lacks: str
) -> None:
    weight = torch.ones(8)
    with pytest.raises(NotRecordedError, match=lacks), Recording(Recorder(tokens=3, logits=1)):
        change(weight)
    assert weight.tolist() == [1.0] * 8
    weight.add_(1.0)  # the recording is over
