"""`bough bench embeddings`: texts of mixed length to vectors, all in one call.

Texts have 2 to 100 words, most of them few, by a seed. With --beside-sentence-transformers that package, if it is
installed, encodes the same texts on the same machine, before and not at the same time; with --beside-onnxruntime that
package does (it needs `onnx`, too), with the same weights and batches of similar length, as fastembed runs its models.
Processor time is told beside the speed: other programs change it less.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from bough.bench.metrics import shown
from bough.core.errors import SettingsError
from bough.core.setting_checks import require_counts

SHORTEST, LONGEST = 2, 100  # words
BATCH = 32  # texts, of onnxruntime; as many as sentence-transformers has by default
WORDS = re.findall(
    r"\w+", "the a of river green when under light seven walks slowly house because music never paper cold morning"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--num-texts", type=int, default=1000, help="texts to turn into vectors")
    load.add_argument("--repeat", type=int, default=1, help="runs of the load; the best counts")
    load.add_argument("--seed", type=int, default=0, help="of the texts")
    load.add_argument("--beside-sentence-transformers", action="store_true", help="measure that package, too")
    load.add_argument("--beside-onnxruntime", action="store_true", help="the same, of the weights as ONNX")
    load.add_argument("--json", action="store_true", help="print one JSON object per run")


def main(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    require_counts(args, ("num_texts", "repeat"))
    texts = mixed_texts(args.num_texts, args.seed)
    if args.beside_sentence_transformers:
        _print(args, "sentence-transformers", _best(args.repeat, texts, _their_encoder(settings)))
    theirs = None
    if args.beside_onnxruntime:
        encode = _onnx_encoder(settings)
        _print(args, "onnxruntime", _best(args.repeat, texts, encode))
        theirs = encode(texts)
    from bough.launch.engine import Engine

    with Engine(**settings) as engine:
        engine.encode(texts[:32])
        result = _best(args.repeat, texts, engine.encode)
        outputs = engine.encode(texts)
    tokens = sum(output["meta_info"]["prompt_tokens"] for output in outputs)
    if theirs is not None:
        result["largest_difference"] = float(np.abs(np.array([each["embedding"] for each in outputs]) - theirs).max())
    _print(args, "bough", {**result, "tokens_per_s": tokens / result["duration_s"]})
    return 0


def mixed_texts(count: int, seed: int = 0) -> list[str]:
    """Lengths fall off as those of sentences and paragraphs do."""
    r = random.Random(seed)
    lengths = [min(LONGEST, SHORTEST + int(r.expovariate(1 / 20))) for _ in range(count)]
    return [" ".join(r.choices(WORDS, k=length)) for length in lengths]


def _best(repeat: int, texts: Sequence[str], encode: Callable[[list[str]], Any]) -> dict[str, float]:
    durations, processor = [], []
    for _ in range(repeat):
        began, used = time.perf_counter(), _processor_s()
        encode(list(texts))
        durations.append(time.perf_counter() - began)
        processor.append(_processor_s() - used)
    least = {"duration_s": min(durations), "processor_s": min(processor)}
    return {"texts": len(texts), **least, "texts_per_s": len(texts) / min(durations)}


def _processor_s() -> float:
    """Of this process and of those that it has started."""
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (this, *this.children(recursive=True)))


def _their_encoder(settings: dict[str, Any]) -> Callable[[list[str]], Any]:
    try:
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]
    except ImportError as error:
        raise SettingsError(f"--beside-sentence-transformers needs that package ({error}).") from None
    from bough.core.settings import Settings
    from bough.loader.locate import find_files

    folder = find_files(Settings.from_flat(settings).model).folder
    model = SentenceTransformer(str(folder), device="cpu")
    model.encode(WORDS)
    return lambda texts: model.encode(texts)


def _onnx_encoder(settings: dict[str, Any]) -> Callable[[list[str]], Any]:
    """For models that give the mean of their states, normalised, in float32, on the threads of `cpu_threads`."""
    try:
        import onnx  # type: ignore[import-not-found]  # noqa: F401  (torch needs it)
        import onnxruntime  # type: ignore[import-not-found]
    except ImportError as error:
        raise SettingsError(f"--beside-onnxruntime needs onnxruntime and onnx ({error}).") from None
    import transformers

    from bough.core.settings import Settings
    from bough.loader.locate import find_files

    chosen = Settings.from_flat(settings).model
    folder, names = find_files(chosen).folder, ["input_ids", "attention_mask", "token_type_ids"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = transformers.AutoConfig.from_pretrained(folder).max_position_embeddings
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    sample = tokenizer(WORDS[:2], padding=True, return_tensors="pt")
    axes = {name: {0: "texts", 1: "tokens"} for name in (*names, "states")}
    inputs = tuple(sample[name] for name in names)
    how: dict[str, Any] = {"input_names": names, "output_names": ["states"], "dynamic_axes": axes}
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        torch.onnx.export(_States(model), inputs, file.name, opset_version=17, dynamo=False, **how)
        written = Path(file.name).read_bytes()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = chosen.cpu_threads or 0
    session = onnxruntime.InferenceSession(written, options, providers=["CPUExecutionProvider"])

    def encode(texts: list[str]) -> Any:
        ids = tokenizer(texts, truncation=True)["input_ids"]
        order = sorted(range(len(texts)), key=lambda i: -len(ids[i]))
        vectors = np.empty((len(texts), model.config.hidden_size), np.float32)
        for begin in range(0, len(order), BATCH):
            rows = order[begin : begin + BATCH]
            batch = tokenizer.pad({"input_ids": [ids[i] for i in rows]}, return_tensors="np")
            mask = batch["attention_mask"]
            states = session.run(["states"], {**batch, "token_type_ids": np.zeros_like(mask)})[0]
            sums = (states * mask[..., None]).sum(1)
            vectors[rows] = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        return vectors

    encode(WORDS)
    return encode


class _States(torch.nn.Module):
    """A model whose inputs are known by their places and that gives its last states alone, as ONNX is traced."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state
        return states


def _print(args: argparse.Namespace, run: str, result: dict[str, float]) -> None:
    if args.json:
        print(json.dumps({"run": run, **result}))
    else:
        print(f"{run}: " + ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in result.items()))


def _shown(value: float) -> str:
    return f"{value:.1e}" if 0 < value < 0.01 else shown(value)
