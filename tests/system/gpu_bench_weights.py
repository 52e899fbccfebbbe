"""What new weights cost an engine on a GPU, as JSON lines: `PYTHONPATH=. python` this file.

A server of Llama-3.1-8B's shape with random weights gets other random weights, 16 GB, from this process on the same
GPU by CUDA's handles: seconds of `shared_tensors` (`share_s`), of the request (`update_s`) and of both until the
tensors may change again (`total_s`), for no, small and all tensors gathered in one storage. Then eight clients ask
all the time while weights change: how many answers are those of the weights that they name (`right`). Then the GPU's
memory by nvidia-smi before and after it is released and resumed. `--disk` adds an update from files of these weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from bough.core.settings import Settings
from bough.executor.load_model import resolve_config
from bough.loader.locate import ModelFiles, find_files
from bough.loader.source import DummySource
from bough.rl import GATHER_BELOW, shared_tensors
from tests.system.serving import running, until

ON_GPU = torch.cuda.is_available()  # without one, the same lines of a small model show that all works
PROMPT = list(range(10, 74))
GREEDY = {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True}
CLIENTS, FILE_BYTES = 8, 4 << 30


def report(what: str, **found: Any) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}
    print(json.dumps({"what": what, **rounded}), flush=True)


def used_mib() -> int | None:
    """Of the GPU, by all processes."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def random_tensors(files: ModelFiles, settings: Settings, seed: int) -> dict[str, torch.Tensor]:
    """By the checkpoint's names. Those of the engine are drawn in another way."""
    source, device = DummySource(resolve_config(files, settings)), "cuda" if ON_GPU else "cpu"
    draw = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name in source.names():
        values = torch.empty(source.shape(name), dtype=torch.bfloat16, device=device)
        tensors[name] = values.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.02, generator=draw)
    return tensors


class Bench:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)

    def post(self, route: str, **fields: Any) -> dict[str, Any]:
        reply = self._http.post(route, json=fields)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def answer(self) -> tuple[str, list[int]]:
        """The version of the weights, and the tokens."""
        output = self.post("/generate", input_ids=PROMPT, sampling_params=GREEDY)
        return output["meta_info"]["weight_version"], output["output_ids"]

    def update(self, tensors: dict[str, torch.Tensor], gather_below: int, version: str) -> dict[str, Any]:
        began = time.perf_counter()
        with shared_tensors(tensors, gather_below) as path:
            shared = time.perf_counter()
            self.post("/update_weights_from_ipc", files=[path], weight_version=version)
            updated = time.perf_counter()
            content = Path(path).read_bytes() if ON_GPU else b"{}"
        seconds = {"share_s": shared - began, "update_s": updated - shared, "total_s": time.perf_counter() - began}
        return {**seconds, "handles": len(json.loads(content).get("storages", []))}

    def asked_meanwhile(self, tensors: dict[str, dict[str, torch.Tensor]], rounds: int) -> dict[str, Any]:
        """Clients ask all the time, while weights change."""
        expected = {}
        for version in tensors:
            self.update(tensors[version], GATHER_BELOW, version)
            expected[version] = self.answer()[1]
        answers: list[tuple[str, list[int]]] = []
        stop, seconds = threading.Event(), []

        def ask() -> None:
            while not stop.is_set():
                answers.append(self.answer())

        asking = [threading.Thread(target=ask) for _ in range(CLIENTS)]
        for thread in asking:
            thread.start()
        for _ in range(rounds):
            for version in tensors:
                enough = len(answers) + 2 * CLIENTS
                until(lambda enough=enough: len(answers) > enough, "answers between updates")
                seconds.append(self.update(tensors[version], GATHER_BELOW, version)["total_s"])
        stop.set()
        for thread in asking:
            thread.join()
        right = sum(tokens == expected[version] for version, tokens in answers)
        differ = len({tuple(tokens) for tokens in expected.values()}) == len(expected)
        return {"answers": len(answers), "right": right, "weights_differ": differ, "largest_s": max(seconds)}

    def sleep(self, tags: list[str]) -> dict[str, Any]:
        before, (_, expected) = used_mib(), self.answer()
        began = time.perf_counter()
        self.post("/release_memory_occupation", tags=tags)
        released, asleep = time.perf_counter() - began, used_mib()
        began = time.perf_counter()
        self.post("/resume_memory_occupation", tags=tags)
        resumed, after = time.perf_counter() - began, used_mib()
        same = self.answer()[1] == expected
        mib = {"used_mib": before, "released_mib": asleep, "resumed_mib": after}
        return {"tags": tags, **mib, "release_s": released, "resume_s": resumed, "same_tokens": same}

    def from_disk(self, tensors: dict[str, torch.Tensor], config: Path, folder: Path) -> dict[str, Any]:
        """Files of a few GB, as checkpoints have them. Both times include the disk: the system holds none of them."""
        shutil.copy(config, folder / "config.json")
        part, held, number = dict[str, torch.Tensor](), 0, 0
        for name, tensor in tensors.items():
            part[name] = tensor.cpu()
            held += tensor.nbytes
            if held >= FILE_BYTES or name == list(tensors)[-1]:
                save_file(part, folder / f"model-{number:05}.safetensors")
                part, held, number = {}, 0, number + 1
        seconds = {}
        for what in ("update_s", "read_s", "update_again_s"):
            forget(folder)
            began = time.perf_counter()
            if what == "read_s":
                read(folder)
            else:
                self.post("/update_weights_from_disk", model_path=str(folder), weight_version="disk")
            seconds[what] = time.perf_counter() - began
        return {"files": number, **seconds, "gb": gigabytes(tensors)}


def forget(folder: Path) -> None:
    """The system gives up what it holds of the files, so that the next reader waits for the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> None:
    """All of the files, one after the other, by one thread: what the disk gives without an engine."""
    buffer = bytearray(64 << 20)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def gigabytes(tensors: dict[str, torch.Tensor]) -> float:
    return sum(tensor.nbytes for tensor in tensors.values()) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--folder", help="of a model whose configuration is taken instead")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--disk", action="store_true", help="also update from files, of which 16 GB are written first")
    parser.add_argument("--limit", type=int, default=400, help="seconds after which it is ended")
    options = parser.parse_args()
    signal.alarm(options.limit)
    chosen = (
        {"model_path": options.folder, "load_format": "dummy"} if options.folder else {"model_shape": options.shape}
    )
    settings = Settings.from_flat({**chosen, "context_length": 8192})
    files = find_files(settings.model)
    flags = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", value)]
    # The trainer's weights and what it gathers have their place beside the engine. Tokens do not depend on the batch.
    flags += ["--context-length", "8192", "--skip-tokenizer-init", "--enable-deterministic-inference"]
    flags += ["--mem-fraction-static", "0.5"] if ON_GPU else ["--max-total-tokens", "9000", "--cpu-threads", "1"]
    began = time.perf_counter()
    with running(*flags) as server, tempfile.TemporaryDirectory() as folder:
        bench = Bench(server.url)
        first = bench.answer()[1]
        report("start", seconds=time.perf_counter() - began, used_mib=used_mib())
        for tags in (["weights"], ["kv_cache"], ["weights", "kv_cache"]):
            report("release", **bench.sleep(tags))
        tensors = {"a": random_tensors(files, settings, 1), "b": random_tensors(files, settings, 2)}
        for gather_below in (0, GATHER_BELOW, 1 << 40):
            for number in range(options.repeat):
                found = bench.update(tensors["ab"[number % 2]], gather_below, str(number))
                report("ipc", gather_below=gather_below, gb=gigabytes(tensors["a"]), **found, used_mib=used_mib())
        report("ipc beside requests", clients=CLIENTS, **bench.asked_meanwhile(tensors, options.repeat))
        if options.disk:
            assert files.config is not None
            report("disk", **bench.from_disk(tensors["b"], files.config, Path(folder)))
        tensors.clear()
        if ON_GPU:
            torch.cuda.empty_cache()
            report("trainer's tensors dropped", allocated=torch.cuda.memory_allocated(), used_mib=used_mib())
        if not options.disk:
            bench.post("/release_memory_occupation")
            bench.post("/resume_memory_occupation")  # from the files, which have the first weights
            report("resumed", same_tokens=bench.answer()[1] == first, used_mib=used_mib())


if __name__ == "__main__":
    main()
