"""Writes a checkpoint as AWQ publishes them, with random weights in the shape of a public model: `PYTHONPATH=. python`
this file FOLDER, for benchmarks of files of 4 bits (`bough bench offline --model-path FOLDER --skip-tokenizer-init`).

Projections are groups of 128 inputs with zero points; embedding, head and norms have 16 bits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from bough.core.settings import Settings
from bough.executor.load_model import resolve_config
from bough.loader.locate import find_files
from bough.loader.source import DummySource

GROUP, FILE_BYTES = 128, 4 << 30
SCALE = 0.02 / 4.6  # of integers that are spread evenly


def tensors_of(name: str, shape: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    if not name.endswith("_proj.weight"):
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        return {name: torch.empty(shape, dtype=torch.float16, device=device).normal_(mean, 0.02)}
    outputs, inputs = shape
    stem = name.removesuffix("weight")

    def words(*size: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device=device)

    return {
        f"{stem}qweight": words(inputs, outputs // 8),
        f"{stem}qzeros": torch.full((inputs // GROUP, outputs // 8), -0x77777778, dtype=torch.int32, device=device),
        f"{stem}scales": torch.full((inputs // GROUP, outputs), SCALE, dtype=torch.float16, device=device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="other than the shape's")
    options = parser.parse_args()
    override = {} if options.layers is None else {"num_hidden_layers": options.layers}
    given = {"model_shape": options.shape, "json_model_override_args": json.dumps(override)}
    settings = Settings.from_flat(given)
    files = find_files(settings.model)
    assert files.config is not None
    source = DummySource(resolve_config(files, settings))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.folder.mkdir(parents=True, exist_ok=True)
    scheme = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    config = {**json.loads(files.config.read_text()), **override, "quantization_config": scheme}
    (options.folder / "config.json").write_text(json.dumps(config))
    held, size, number = dict[str, torch.Tensor](), 0, 0
    names = list(source.names())
    for name in names:
        for key, tensor in tensors_of(name, source.shape(name), device).items():
            held[key] = tensor.cpu()
            size += tensor.nbytes
        if size >= FILE_BYTES or name == names[-1]:
            save_file(held, options.folder / f"model-{number:05}.safetensors")
            held, size, number = {}, 0, number + 1


if __name__ == "__main__":
    main()
