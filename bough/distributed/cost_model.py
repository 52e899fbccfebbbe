"""How long steps take when a model is split over GPUs: modelled from public figures of the hardware, not measured.

On a rank the products read their weights and then multiply; attention takes the longer of reading the cache and
multiplying; activations pass through memory; each layer takes a constant. Exchanges take their bytes over the link and
a latency for each hop. The shares of the hardware's figures are those that fit one H200 (docs/scaling.md).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from bough.core.errors import SettingsError
from bough.core.files import table_beside

MEMORY_SHARE, CACHE_SHARE = 0.89, 0.72  # of the bandwidth: reached by products, and by attention that reads the cache
PRODUCT_SHARE, ATTENTION_SHARE = 0.77, 0.6  # of the FLOP/s
LINK_SHARE = 0.82  # of a link, what NCCL's protocol leaves
ACTIVATION_WIDTHS = 70  # times the hidden size: numbers that a token reads and writes in a layer beside the products
ACTIVATION_BYTES = 2
LAYER_S, LATENT_S, EXPERTS_S = 12.4e-6, 15.5e-6, 5e-6  # of a layer however few its tokens; more for latents, experts
PER_LAYER = ("kv_bytes", "decode_flops", "prefill_flops")  # of a `ModelShare`: sums over its layers
HOP_S, NETWORK_HOP_S = 2.5e-6, 6e-6  # of an exchange inside a host, and between hosts


class Gpu(msgspec.Struct, frozen=True):
    """Figures of the data sheets; of links what one GPU can send."""

    memory_gib: float
    bandwidth: float  # TB/s
    bf16: float  # dense TFLOP/s
    fp8: float  # that of bf16, where there are no such products
    link: float  # GB/s inside a host
    network: float  # GB/s out of it
    capability: tuple[int, int] = (9, 0)  # which formats of numbers an engine has there


GPUS = msgspec.convert(table_beside(__file__, "gpus.toml"), dict[str, Gpu])


@dataclass(frozen=True, slots=True)
class Cluster:
    gpu: Gpu
    per_host: int
    hosts: int = 1

    @staticmethod
    def parse(text: str) -> Cluster:
        """`8xH200` is one host, `8xH200,2` two of them."""
        found = re.fullmatch(r"([1-9]\d*)x(\w+)(?:,([1-9]\d*))?", text)
        if found is None or found[2].upper() not in GPUS:
            kinds = ", ".join(GPUS)
            raise SettingsError(f"--gpus is like 8xH200, or 8xH200,2 for two such hosts, got {text!r}; kinds: {kinds}.")
        return Cluster(GPUS[found[2].upper()], int(found[1]), int(found[3] or 1))

    def all_gather_s(self, nbytes: float, ranks: int) -> float:
        """`nbytes` are those of the whole. A reduce-scatter takes as long, and an all-reduce is one of each. Hosts
        exchange with all of their GPUs at once."""
        inside, hosts = min(ranks, self.per_host), -(-ranks // self.per_host)
        near = (inside - 1) / inside * nbytes / (self.gpu.link * 1e9 * LINK_SHARE)
        far = (hosts - 1) / ranks * nbytes / (self.gpu.network * 1e9 * LINK_SHARE)
        return near + far + math.ceil(math.log2(inside)) * HOP_S + math.ceil(math.log2(hosts)) * NETWORK_HOP_S

    def all_to_all_s(self, nbytes: float, ranks: int) -> float:
        """Each rank sends `nbytes` in equal parts; links and network work side by side."""
        inside = min(ranks, self.per_host)
        near = (inside - 1) / ranks * nbytes / (self.gpu.link * 1e9 * LINK_SHARE)
        far = (ranks - inside) / ranks * nbytes / (self.gpu.network * 1e9 * LINK_SHARE)
        return max(near, far) + (NETWORK_HOP_S if ranks > inside else HOP_S)


@dataclass(frozen=True, slots=True)
class Split:
    """`replicas` of a model on `tp * pp` GPUs each. Attention runs in `groups` groups of the tp ranks, each with
    requests of its own (DP attention); experts are spread over `ep` of them."""

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    ep: int = 1
    groups: int = 1

    def servers(self, cluster: Cluster) -> tuple[int, str]:
        """How many to start, and their flags. Replicas on one host share a server."""
        hosts = self.tp * self.pp // cluster.per_host
        together = 1 if self.groups > 1 or hosts else min(self.replicas, cluster.per_host // (self.tp * self.pp))
        sizes = {"tp": self.tp, "pp": self.pp, "dp": max(together, self.groups), "ep": self.ep}
        flags = [f"--{name}-size {size}" for name, size in sizes.items() if size > 1]
        flags += ["--enable-dp-attention"] * (self.groups > 1)
        flags += [f"--nnodes {hosts} --node-rank RANK --dist-init-addr HOST:PORT"] * (hosts > 1)
        return self.replicas // together, " ".join(flags)


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes: a token for each of `decodes` requests, and `prompt` tokens, with what these see in the
    mean."""

    decodes: float = 0.0
    context: float = 0.0
    prompt: float = 0.0
    prompt_context: float = 0.0

    def part(self, parts: float) -> Load:
        return replace(self, decodes=self.decodes / parts, prompt=self.prompt / parts)


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What one rank holds of a model or of a stage of it, and what a token costs it."""

    layers: tuple[tuple[int, int, int], ...]  # numbers of each: attention, all others, experts that a router chooses
    embedding: int
    head: int  # that gives the logits
    tied: bool  # both are one matrix, where a rank has both
    hidden_size: int
    vocab_size: int
    kv_bytes: float  # that a token keeps in all layers
    decode_flops: float  # of a query and a token that it sees, in all layers
    prefill_flops: float
    window: float = math.inf  # tokens that `window_share` of the layers see
    window_share: float = 0.0
    latent: bool = False
    experts: int = 1
    per_token: int = 1
    weight_bytes: float = 2.0  # of a number of the layers; the matrices of the vocabulary have 16 bits

    @property
    def nbytes(self) -> float:
        vocabulary = max(self.embedding, self.head) if self.tied else self.embedding + self.head
        return sum(map(sum, self.layers)) * self.weight_bytes + vocabulary * ACTIVATION_BYTES

    def stages(self, count: int) -> list[ModelShare]:
        """Of a pipeline: layers in order, the first stages with one more where they do not divide."""
        total, stages = len(self.layers), []
        for number in range(count):
            begin, end = (place * (total // count) + min(place, total % count) for place in (number, number + 1))
            changed: dict[str, Any] = {name: getattr(self, name) * (end - begin) / total for name in PER_LAYER}
            changed.update(embedding=self.embedding * (number == 0), head=self.head * (number == count - 1))
            stages.append(replace(self, layers=self.layers[begin:end], **changed))
        return stages

    def seen(self, context: float) -> float:
        """Tokens that a query sees in the mean of the layers."""
        return context + self.window_share * (min(context, self.window) - context)


def stage_cost(share: ModelShare, cluster: Cluster, split: Split, load: Load) -> dict[str, float]:
    """Seconds of a step on each rank of a stage, by what they are spent on."""
    gpu, own, tokens = cluster.gpu, load.part(split.groups), load.decodes + load.prompt
    attention, dense, experts = map(sum, zip(*share.layers, strict=True))
    rows, with_experts = load.decodes + (load.prompt > 0), sum(layer[2] > 0 for layer in share.layers)
    used = share.per_token / share.experts
    touched = 1.0 - (1.0 - used) ** tokens  # of the experts, those that some token draws, if all are drawn alike
    bandwidth, bf16 = gpu.bandwidth * 1e12, gpu.bf16 * 1e12
    read = (attention + dense + experts * touched) * share.weight_bytes + share.head * ACTIVATION_BYTES
    flops = 2.0 * ((own.decodes + own.prompt) * attention + tokens * (dense + experts * used))
    pairs = own.decodes * share.seen(own.context)
    cache_s = pairs * share.kv_bytes / (CACHE_SHARE * bandwidth)
    prompt_flops = own.prompt * share.seen(own.prompt_context) * share.prefill_flops
    traffic = tokens * len(share.layers) * ACTIVATION_WIDTHS * share.hidden_size * ACTIVATION_BYTES
    constant_s = len(share.layers) * (LAYER_S + LATENT_S * share.latent)
    return {
        "weights": read / (MEMORY_SHARE * bandwidth),
        "products": flops / (PRODUCT_SHARE * 1e12 * (gpu.fp8 if share.weight_bytes == 1.0 else gpu.bf16))
        + 2.0 * rows * share.head / (PRODUCT_SHARE * bf16),
        "attention": max(cache_s, pairs * share.decode_flops / (ATTENTION_SHARE * bf16))
        + prompt_flops / (ATTENTION_SHARE * bf16),
        "others": traffic / (MEMORY_SHARE * bandwidth) + constant_s + EXPERTS_S * with_experts,
        "exchange": _exchange_s(share, cluster, split, tokens, rows) if split.tp > 1 else 0.0,
    }


def _exchange_s(share: ModelShare, cluster: Cluster, split: Split, tokens: float, rows: float) -> float:
    """An all-reduce behind attention and one behind the MLP. With DP attention the second is a gathering of all tokens
    before and a scattering of sums after it, or for experts that are spread, two all-to-alls."""
    hidden, layers, tp = tokens * share.hidden_size * ACTIVATION_BYTES, len(share.layers), split.tp
    whole = 2.0 * cluster.all_gather_s(hidden, tp)
    ends = whole * (share.embedding > 0)
    ends += cluster.all_gather_s(rows * share.vocab_size * ACTIVATION_BYTES, tp) * (share.head > 0)
    if split.groups == 1:
        return ends + 2 * layers * whole
    spread = sum(layer[2] > 0 for layer in share.layers) if split.ep > 1 else 0
    sent = 2.0 * cluster.all_to_all_s(hidden / tp * share.per_token, tp)
    behind = 2.0 * cluster.all_gather_s(hidden / split.groups, tp // split.groups)
    return ends + layers * behind + spread * sent + (layers - spread) * whole


def step_cost(share: ModelShare, cluster: Cluster, split: Split, load: Load) -> dict[str, float]:
    """Of a step from the first stage to the last; the slowest sets the pace. Decodes are dealt to as many micro-batches
    as there are stages, so that all stages work if there are requests enough."""
    load = load.part(min(split.pp, max(1.0, load.decodes)))
    costs = [stage_cost(stage, cluster, split, load) for stage in share.stages(split.pp)]
    slowest = max(costs, key=lambda cost: sum(cost.values()))
    if split.pp > 1:
        near = split.tp * split.pp <= cluster.per_host
        speed, hop_s = (cluster.gpu.link, HOP_S) if near else (cluster.gpu.network, NETWORK_HOP_S)
        hidden = (load.decodes + load.prompt) * share.hidden_size * ACTIVATION_BYTES
        slowest["exchange"] += hidden / (speed * 1e9 * LINK_SHARE) + hop_s
    return {part: split.pp * seconds for part, seconds in slowest.items()}
