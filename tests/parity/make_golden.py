"""Writes the golden file from `transformers`: `python -m tests.parity.make_golden`, a few minutes, by hand.

To be run again only when the default model or the prompts change; a newer `transformers` should give the same file.
"""

from __future__ import annotations

from datetime import date

import torch
import transformers

from bough.core.settings import ModelSettings
from bough.launch.parts import open_tokenizer
from bough.loader import catalogue
from bough.loader.locate import locate
from bough.tokenizer.tokenizer import Tokenizer
from tests.parity.golden import NEW_TOKENS, PATH, PROMPT_COUNT, SMALLEST_GAP, Golden, Sample, write
from tests.parity.golden_prompts import PROMPTS, Messages


def main() -> None:
    entry = catalogue.DEFAULT
    tokenizer = open_tokenizer(locate(entry.name, None), ModelSettings())
    assert tokenizer is not None
    model = load_reference(entry)
    samples: list[Sample] = []
    for name, prompt in PROMPTS.items():
        if len(samples) == PROMPT_COUNT:
            break
        sample = continue_greedily(model, name, to_ids(tokenizer, prompt))
        print(f"{name}: {len(sample.prompt)} tokens, gap {sample.gap:.4f}: {tokenizer.decode(sample.output)!r}")
        if sample.gap < SMALLEST_GAP:
            print(f"{name}: left out, a near tie")
        else:
            samples.append(sample)
    assert len(samples) == PROMPT_COUNT, "too many near ties; add spare prompts"
    made = {
        "model": entry.name,
        "gguf_sha256": entry.source.sha256,
        "dtype": "float32",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
    write(Golden(made, samples))
    print(f"wrote {PATH.name}, {PATH.stat().st_size} bytes")


def load_reference(entry: catalogue.Entry) -> transformers.PreTrainedModel:
    """The GGUF's weights, dequantised to fp32, in the implementation of `transformers`."""
    path = catalogue.pull(entry)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    return model.eval()


def to_ids(tokenizer: Tokenizer, prompt: str | Messages) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.encode(tokenizer.apply_chat_template(prompt), add_special_tokens=False)


@torch.inference_mode()
def continue_greedily(model: transformers.PreTrainedModel, name: str, prompt: list[int]) -> Sample:
    """The best token at every step, with a KV cache; end tokens are tokens like any other."""
    output: list[int] = []
    gaps: list[float] = []
    tokens, cache = torch.tensor([prompt]), None
    for _ in range(NEW_TOKENS):
        result = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        best = result.logits[0, -1].topk(2)
        output.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        tokens, cache = best.indices[:1].unsqueeze(0), result.past_key_values
    return Sample(name, round(min(gaps), 5), prompt, output)


if __name__ == "__main__":
    main()
