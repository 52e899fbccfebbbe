"""What images cost on a GPU, as JSON lines: `PYTHONPATH=. python` this file `llava-1.5-7b` or `qwen2.5-vl-3b`.

An engine of that shape with random weights answers prompts with one image each, of 336² and 1024² pixels, all
different and all out of four: images a second, time to the first token, the device's busy share and the encoder's
seconds. Then texts are streamed alone, beside a flood of prompts that are as long as those with images, and beside a
flood of different images: how long a stream waits for its next token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from bough import Engine
from tests.multimodal import checkpoints

NEW_TOKENS, TEXT_TOKENS, TEXTS = 64, 256, 8
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # family, text, vision, image
    "llava-1.5-7b": (
        "llava",
        {
            "model_type": "llama", "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 4096, "eos_token_id": None,
        },
        {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
            "image_size": 336, "patch_size": 14,
        },
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
    "qwen2.5-vl-3b": (
        "qwen2_5_vl",
        {
            "model_type": "qwen2_5_vl_text", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
            "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
            "max_position_embeddings": 32768, "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        {
            "depth": 32, "hidden_size": 1280, "num_heads": 16, "num_attention_heads": 16, "intermediate_size": 3420,
            "out_hidden_size": 2048,
            "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "patch_size": 14, "spatial_merge_size": 2,
        },
        {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280 * 2},
    ),
    "tiny": (
        "qwen2_5_vl",
        {**checkpoints.TEXT, "max_position_embeddings": 4096, **checkpoints.LANGUAGE["qwen2_5_vl"]},
        checkpoints.SEEING["qwen2_5_vl"],
        {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 64},
    ),
}  # fmt: skip


def write_folder(folder: Path, shape: str) -> str:
    """A checkpoint without weights; the text that stands for an image."""
    family, text, vision, image = SHAPES[shape]
    spec = msgspec.structs.replace(checkpoints.SPECS[family], image=image)
    checkpoints.SPECS[family] = spec
    checkpoints.write_checkpoint(folder, family, text=text, vision=vision)
    return spec.place


def pictures(count: int, side: int, seed: int) -> list[Image.Image]:
    """Like photographs: smooth, so that decoding and resizing cost what they cost there."""
    draw = np.random.default_rng(seed)
    small = draw.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    return [Image.fromarray(each).resize((side, side), Image.Resampling.BICUBIC) for each in small]


class Bench:
    def __init__(self, engine: Engine, place: str) -> None:
        self._engine, self._place = engine, place
        self.gaps = list[float]()
        self._tokens = 0  # of the longest prompt

    def state(self) -> dict[str, Any]:
        return self._engine.get_server_info()["internal_states"][0]

    async def ask(self, number: int, image: Image.Image | None) -> float:
        """Seconds to the first token."""
        sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        began, first = time.perf_counter(), 0.0
        text = f"{self._place} Question {number}: what does it show?" if image else f"{number} " + "." * self._tokens
        options = {"image_data": image} if image else {}
        async for output in await self._engine.async_generate(text, sampling, stream=True, **options):
            first = first or time.perf_counter() - began
            self._tokens = max(self._tokens, output["meta_info"]["prompt_tokens"])
        return first

    async def show(self, images: list[Image.Image]) -> dict[str, float]:
        busy, stop = list[float](), asyncio.Event()
        encoded_s = (await asyncio.to_thread(self.state))["mm_encoder_seconds_total"]

        async def watch() -> None:
            while not stop.is_set():
                await asyncio.sleep(0.5)
                busy.append((await asyncio.to_thread(self.state))["device_busy_share"] or 0.0)

        watching = asyncio.create_task(watch())
        began = time.perf_counter()
        firsts = await asyncio.gather(*(self.ask(number, image) for number, image in enumerate(images)))
        seconds = time.perf_counter() - began
        stop.set()
        await watching
        found = {"images_s": len(images) / seconds, "ttft_median_s": float(np.median(firsts))}
        found |= {"ttft_p99_s": float(np.percentile(firsts, 99)), "busy_share": float(np.median(busy))}
        return found | {"encoder_s": (await asyncio.to_thread(self.state))["mm_encoder_seconds_total"] - encoded_s}

    async def stream(self, number: int) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": TEXT_TOKENS, "ignore_eos": True}
        before, text = None, f"Text {number}: tell me of the sea. " * 8
        async for _ in await self._engine.async_generate(text, sampling, stream=True):
            now = time.perf_counter()
            if before is not None:
                self.gaps.append(now - before)
            before = now

    async def flood(self, images: Sequence[Image.Image | None]) -> dict[str, float]:
        """Gaps between tokens of texts, in milliseconds."""
        self.gaps = []
        texts = [asyncio.create_task(self.stream(number)) for number in range(TEXTS)]
        await asyncio.sleep(0.2)
        shown = [asyncio.create_task(self.ask(number, image)) for number, image in enumerate(images)]
        await asyncio.gather(*texts, *shown)
        return {f"gap_p{p}_ms": 1e3 * float(np.percentile(self.gaps, p)) for p in (50, 99)}


def report(line: dict[str, Any]) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}
    print(json.dumps(rounded), flush=True)


async def measure(bench: Bench, shape: str, count: int, sides: list[int], *, gaps_only: bool) -> None:
    await bench.show(pictures(8, sides[0], seed=0))
    while (await asyncio.to_thread(bench.state))["warming_up"]:  # graphs are captured in idle moments
        await asyncio.sleep(0.5)
    for side in sides:
        for distinct in (count,) if gaps_only else (count, 4):
            images = pictures(distinct, side, seed=side + distinct) * (count // distinct)
            report({"shape": shape, "side": side, "images": count, "distinct": distinct, **await bench.show(images)})
        floods = {"nothing": [], "prompts": [None] * (count // 2), "images": pictures(count // 2, side, seed=side + 1)}
        for beside, flood in floods.items():
            report({"shape": shape, "side": side, "texts": TEXTS, "beside": beside, **await bench.flood(flood)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--sides", type=int, nargs="+", default=[336, 1024])
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of the engine")
    parser.add_argument("--gaps-only", action="store_true", help="leaves out repeated images")
    parser.add_argument("--limit", type=int, default=150, help="seconds after which it is ended")
    options = parser.parse_args()
    signal.alarm(options.limit)
    with tempfile.TemporaryDirectory() as folder:
        place = write_folder(Path(folder), options.shape)
        flags = {"load_format": "dummy", "context_length": 4096, "max_running_requests": 128, **options.engine}
        with Engine(folder, mm_processor_worker_num=8, **flags) as engine:
            asyncio.run(
                measure(Bench(engine, place), options.shape, options.images, options.sides, gaps_only=options.gaps_only)
            )


if __name__ == "__main__":
    main()
