"""DeepSeek's models against transformers, on tiny random checkpoints that transformers itself has written: the same
logits however a text is cut and batched, and the same greedy tokens from the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bough.core.settings import Settings
from bough.distributed.group import ALONE, RankGroup
from bough.executor.load_model import resolve_config
from bough.executor.native_tapes import why_not_recorded
from bough.loader.load import load_weights, open_source
from bough.loader.locate import locate
from bough.models.base import CausalLM
from bough.models.registry import build_model
from tests.fakes.forward import Forward
from tests.fakes.ranks import ThreadGroup, on_ranks
from tests.parity.engines import LocalEngine

VOCAB = 211
TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
    "initializer_range": 0.3,  # choices of experts must not hang on rounding
    "bos_token_id": 1,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
    "beta_fast": 32,
    "beta_slow": 1,
}


def v2_lite() -> transformers.PreTrainedModel:
    config = transformers.DeepseekV2Config(**SIZES, q_lora_rank=None, rope_parameters=YARN, topk_method="greedy")
    return transformers.DeepseekV2ForCausalLM(config)


def v2_in_groups() -> transformers.PreTrainedModel:
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0}
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**SIZES, q_lora_rank=16, **groups))


def v3() -> transformers.PreTrainedModel:
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "rope_parameters": YARN}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES, q_lora_rank=16, **groups))


def v3_rotating_halves() -> transformers.PreTrainedModel:
    config = transformers.DeepseekV3Config(**SIZES, q_lora_rank=None, n_group=1, topk_group=1, rope_interleave=False)
    return transformers.DeepseekV3ForCausalLM(config)


SPARSE = {"q_lora_rank": 16, "index_n_heads": 9, "index_head_dim": 14, "index_topk": 11}


def v32() -> transformers.PreTrainedModel:
    groups = {"n_group": 4, "topk_group": 2, "rope_parameters": YARN}
    return transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**SIZES, **SPARSE, **groups))


def glm_dsa() -> transformers.PreTrainedModel:
    """The first and the third layer choose tokens, for the others too."""
    sizes = {**SIZES, "num_hidden_layers": 5, "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]}
    shared = ["full", "shared", "full", "shared", "shared"]
    return transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**sizes, **SPARSE, indexer_types=shared))


MODELS = [v2_lite, v2_in_groups, v3, v3_rotating_halves, v32, glm_dsa]


@pytest.fixture(scope="module", params=MODELS, ids=lambda make: make.__name__)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[transformers.PreTrainedModel, Path]:
    torch.manual_seed(0)
    theirs, folder = request.param().eval().float(), tmp_path_factory.mktemp("deepseek")
    for name, parameter in theirs.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    for name, buffer in theirs.named_buffers():
        if "correction_bias" in name:
            buffer.normal_(0.0, 0.3)
    theirs.save_pretrained(folder)
    return theirs, folder


def load(folder: Path, group: RankGroup = ALONE) -> CausalLM:
    files = locate(str(folder))
    config = resolve_config(files, Settings())
    model = build_model(config, group.topology, torch.float32, torch.device("cpu"), group)
    load_weights(model.slots(), open_source(files, config), progress=False, device=torch.device("cpu"))
    return model


@torch.inference_mode()
def their_logits(theirs: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = theirs(torch.tensor([tokens])).logits[0]
    return logits


def draw(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("page_size", [1, 4])
def test_logits_are_theirs_however_the_text_is_cut(
    checkpoint: tuple[transformers.PreTrainedModel, Path], page_size: int
) -> None:
    """A prompt in one go, in chunks beside decodes, one whose beginning is another's, and decodes of many lengths; long
    chunks are computed in the expanded form, short ones and decodes in the absorbed one."""
    theirs, folder = checkpoint
    model = load(folder)
    latent = model.config.latent
    assert latent is not None and (latent.width, model.config.num_kv_heads) == (28, 1)
    texts = [draw(120, 1), draw(70, 2), draw(9, 3)]
    texts.append([*texts[0][:40], *draw(15, 4)])
    expected = [their_logits(theirs, text) for text in texts]
    forward = Forward(model, page_size=page_size)
    done = [0] * 4

    def check(step: dict[int, int]) -> None:
        """So many tokens more of each row."""
        found = forward.step({row: texts[row][done[row] : done[row] + count] for row, count in step.items()})
        for row, count in step.items():
            wanted = expected[row][done[row] : done[row] + count]
            torch.testing.assert_close(found[row], wanted, atol=TOLERANCE, rtol=TOLERANCE)
            done[row] += count

    check({0: 50})
    forward.share(0, 3, 40)
    done[3] = 40
    check({0: 1, 1: 3, 2: 1})
    check({0: 1, 2: 1, 3: 12, 1: 60})
    check({0: 1, 1: 1, 2: 1, 3: 1})
    check({1: 1, 0: 40})
    check({0: 2, 1: 2, 2: 3, 3: 2})


def test_ranks_that_share_the_heads_give_the_same(checkpoint: tuple[transformers.PreTrainedModel, Path]) -> None:
    theirs, folder = checkpoint
    text = draw(80, 1)

    def logits(group: ThreadGroup) -> torch.Tensor:
        forward = Forward(load(folder, group), topology=group.topology)
        return torch.cat([forward.step({0: part})[0] for part in (text[:60], text[60:61], text[61:])])

    for found in (*on_ranks(2, logits), *on_ranks(2, logits, ep_size=2)):
        torch.testing.assert_close(found, their_logits(theirs, text), atol=TOLERANCE, rtol=TOLERANCE)


def test_layers_behind_the_last_are_not_looked_at(
    checkpoint: tuple[transformers.PreTrainedModel, Path], tmp_path: Path
) -> None:
    """V3's checkpoints hold a layer more, which predicts the token after the next."""
    _, folder = checkpoint
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    behind = f"layers.{config['num_hidden_layers']}."
    last = {name: tensor for name, tensor in tensors.items() if "layers.2." in name}
    further = {name.replace("layers.2.", behind): tensor + 1.0 for name, tensor in last.items()}
    further[f"model.{behind}eh_proj.weight"] = torch.ones(3, 3)
    save_file({**tensors, **further}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = draw(12, 5)
    found, expected = (Forward(load(where)).step({0: text})[0] for where in (tmp_path, folder))
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_engine_says_what_they_say(checkpoint: tuple[transformers.PreTrainedModel, Path], device: str) -> None:
    """From a folder with config.json and weights alone: prompts in chunks, a prefix from the cache, several at once."""
    theirs, folder = checkpoint
    config = resolve_config(locate(str(folder)), Settings())
    assert (why_not_recorded(config) is None) == (not config.choosing_layers), "by native kernels, or else by torch"
    texts = [draw(60, 1), [*draw(60, 1)[:45], *draw(8, 6)], draw(5, 7)]
    new = 12
    with torch.inference_mode():
        expected = [
            theirs.generate(torch.tensor([text]), max_new_tokens=new, do_sample=False)[0, len(text) :].tolist()
            for text in texts
        ]
    settings = {"chunked_prefill_size": 32, "max_total_tokens": 1024, "dtype": "float32", "cpu_threads": 1}
    engine = LocalEngine(folder, new=new, device=device, **settings)
    answers = [*engine.ask(texts[0]), *engine.ask(*texts[1:])]
    assert [output for output, _ in answers] == expected
    assert answers[1][1] >= 44, "from the cache"
