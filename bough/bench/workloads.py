"""The offline workloads on which engines are compared: token ids, seeded, temperature 0.6, all submitted at once.

W1: 256 requests, prompts and outputs of 100-1024 tokens. W2: 512 requests over 8 prefixes of 1024 tokens, 64 own
tokens, 64 outputs. W3: one request, 128 in, 512 out. W4: 32 prompts of 4096 tokens, one output.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

WORKLOADS = ("W1", "W2", "W3", "W4")


@dataclass(frozen=True, slots=True)
class Job:
    prompt: list[int]
    output_tokens: int


def workload(name: str, seed: int = 0, vocab: int = 10_000) -> list[Job]:
    r = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [r.randint(0, vocab) for _ in range(n)]

    if name == "W1":
        prompts = [ids(r.randint(100, 1024)) for _ in range(256)]
        return [Job(p, r.randint(100, 1024)) for p in prompts]
    if name == "W2":
        prefixes = [ids(1024) for _ in range(8)]
        jobs = [Job(prefixes[i % 8] + ids(64), 64) for i in range(512)]
        r.shuffle(jobs)
        return jobs
    if name == "W3":
        return [Job(ids(128), 512)]
    if name == "W4":
        return [Job(ids(4096), 1) for _ in range(32)]
    raise KeyError(name)


def random_jobs(count: int, input_len: int, output_len: int, seed: int = 0, vocab: int = 10_000) -> list[Job]:
    r = random.Random(seed)
    return [Job([r.randint(0, vocab) for _ in range(input_len)], output_len) for _ in range(count)]


def shared_prefix_jobs(
    groups: int, per_group: int, prefix_len: int, question_len: int, output_len: int, seed: int = 0, vocab: int = 10_000
) -> list[Job]:
    """Groups of requests that share a prefix, shuffled."""
    r = random.Random(seed)
    jobs = []
    for _ in range(groups):
        prefix = [r.randint(0, vocab) for _ in range(prefix_len)]
        jobs += [Job(prefix + [r.randint(0, vocab) for _ in range(question_len)], output_len) for _ in range(per_group)]
    r.shuffle(jobs)
    return jobs


def sampling_of(job: Job) -> dict[str, Any]:
    return {"max_new_tokens": job.output_tokens, "temperature": 0.6, "ignore_eos": True}
