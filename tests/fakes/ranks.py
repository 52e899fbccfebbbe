"""Ranks as threads of one process: those of a stage meet at a barrier, and add up in the order of ranks; stages pass
hidden states on through queues. And models to share."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from bough.core.errors import EngineDeadError, RankLostError
from bough.distributed.group import AttentionGroup, RankGroup
from bough.distributed.topology import Topology

T = TypeVar("T")
PATIENCE_S = 60.0
VOCAB = 199  # no number of ranks divides it
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": VOCAB, "eos_token_id": None}
UNTIED = {**LLAMA, "tie_word_embeddings": False, "num_key_value_heads": 1, "attention_bias": True}
MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}
LATENT = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 20,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
STATES = {
    **LLAMA,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
}
MODELS = {"llama": LLAMA, "untied": UNTIED, "moe": MOE, "latent": LATENT, "states": STATES}


class MeetingPlace:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadGroup(RankGroup):
    """`places` are those of the stages, and one for all ranks; `pipes` lead to each rank."""

    def __init__(
        self, topology: Topology, places: Sequence[MeetingPlace], pipes: Sequence[queue.Queue[torch.Tensor]]
    ) -> None:
        self.topology, self._places, self._pipes = topology, places, pipes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meet_stage(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meet_stage(x), dim=1)

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], taken: Sequence[int]) -> torch.Tensor:
        counts = [count.tolist() for count in self._meet_stage(torch.tensor(sent))]
        rows = [part.split(count) for part, count in zip(self._meet_stage(x), counts, strict=True)]
        found = [parts[self.topology.tp_rank] for parts in rows]
        assert [len(part) for part in found] == list(taken)
        return torch.cat(found)

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        return self._meet_stage(x)[0]

    def pass_on(self, x: torch.Tensor) -> None:
        self._pipes[self.topology.rank + self.topology.tp_size].put(x.clone())

    def take_over(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return x.copy_(self._pipes[self.topology.rank].get(timeout=PATIENCE_S))
        except queue.Empty:
            raise RankLostError(f"nothing came in {self.doing}") from None

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        found = self._meet(self._places[-1], self.topology.rank, torch.tensor(values))
        return tuple(torch.stack(found).amin(0).tolist())

    def give_up(self) -> None:
        for place in self._places:
            place.barrier.abort()

    def _meet_stage(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._meet(self._places[self.topology.pp_rank], self.topology.tp_rank, x)

    def _meet(self, place: MeetingPlace, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        place.brought[rank] = x.clone()
        try:
            place.barrier.wait(PATIENCE_S)
            found = [part.clone() for part in place.brought]
            place.barrier.wait(PATIENCE_S)  # nobody brings the next before all have taken this
        except threading.BrokenBarrierError:
            raise RankLostError(f"nobody came in {self.doing}") from None
        return found


def thread_groups(size: int, ep_size: int = 1, stages: int = 1) -> list[ThreadGroup]:
    """Stages of so many ranks each."""
    places = [*(MeetingPlace(size) for _ in range(stages)), MeetingPlace(size * stages)]
    pipes: list[queue.Queue[torch.Tensor]] = [queue.Queue() for _ in range(size * stages)]
    return [ThreadGroup(Topology.at(rank, size, stages, ep_size), places, pipes) for rank in range(size * stages)]


class ThreadAttentionGroup(AttentionGroup, ThreadGroup):
    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(torch.stack(self._meet_stage(torch.tensor(values))).amin(0).tolist())

    def give_up(self) -> None:
        for group in (super(), self.peers, self.everyone):
            group.give_up()  # type: ignore[union-attr]


def attention_groups(groups: int, size: int, ep_size: int = 1) -> list[ThreadAttentionGroup]:
    """Those of all ranks: `groups` of `size` each."""
    everyone, across = thread_groups(groups * size, ep_size), [thread_groups(groups) for _ in range(size)]
    found = []
    for number in range(groups):
        places = [MeetingPlace(size)]
        for rank in range(size):
            place = Topology(rank, size, ep_size, dp_rank=number, dp_size=groups)
            group = ThreadAttentionGroup(place, places, ())
            group.peers = group.turns = across[rank][number]
            group.everyone = everyone[place.rank]
            found.append(group)
    return found


def on_ranks(size: int, work: Callable[[ThreadGroup], T], ep_size: int = 1, stages: int = 1) -> list[T]:
    """What each rank's work returns; where one fails, the others do not wait for it."""

    def run(group: ThreadGroup) -> T:
        try:
            return work(group)
        except BaseException as error:
            if type(error) is not EngineDeadError:  # which every rank finds by itself
                group.give_up()
            raise

    with ThreadPoolExecutor(size * stages) as threads:
        return list(threads.map(run, thread_groups(size, ep_size, stages)))
