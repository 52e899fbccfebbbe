"""Windows that keep their pages alone, on a GPU: the same tokens as with all pages, through graphs and prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from bough.core.model_config import FULL_ATTENTION, ModelConfig
from tests.parity.engines import LocalEngine

pytestmark = pytest.mark.gpu


def test_windows_give_what_all_pages_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    config = transformers.Gemma3TextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        sliding_window=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    )
    transformers.Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(5)
    base = torch.randint(0, 500, (150,), generator=generator).tolist()
    loads = ([base, [*base[:90], 5, 6, 7], [9, 8, 7]], [base], [[*base, 1, 2, 3]], [base[:100]])
    flags = {"max_running_requests": 4, "max_total_tokens": 2000, "page_size": 4}
    windows = LocalEngine(tmp_path, new=40, swa_full_tokens_ratio=0.05, **flags)
    assert windows.limits.pages[1] * 4 < 300
    with monkeypatch.context() as patch:
        patch.setattr(ModelConfig, "attention_groups", property(lambda config: (FULL_ATTENTION,)))
        whole = LocalEngine(tmp_path, new=40, **flags)
    for prompts in loads:
        alike = zip(windows.ask(*prompts), whole.ask(*prompts), strict=True)
        assert all(ours[0] == theirs[0] for ours, theirs in alike)
