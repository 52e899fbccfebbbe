"""Settings of an engine of several ranks or hosts, and of engines that share the work: groups of `Settings`."""

from __future__ import annotations

from dataclasses import dataclass

from bough.core.setting_checks import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """One model on several devices."""

    tp_size: int = setting(1, low=1)
    pp_size: int = setting(1, low=1)
    ep_size: int = setting(1, low=1)
    moe_a2a_backend: str = setting("none", choices=("none", "torch"))
    enable_eplb: bool = setting(False)
    ep_num_redundant_experts: int = setting(0, low=0)
    eplb_rebalance_num_iterations: int = setting(1000, low=1)
    expert_distribution_recorder_mode: str | None = setting(None, choices=("stat",))
    dp_size: int = setting(1, low=1)
    enable_dp_attention: bool = setting(False)
    enable_dp_lm_head: bool = setting(False)
    load_balance_method: str = setting("auto", choices=("auto", "round_robin", "total_requests", "total_tokens"))
    dist_timeout: float = setting(300.0, low=1.0)
    nnodes: int = setting(1, low=1)
    node_rank: int = setting(0, low=0)
    dist_init_addr: str | None = setting(None)
    use_ray: bool = setting(False)
    distributed_executor_backend: str | None = setting(None, choices=("mp", "ray"))
    simulate_tp: int = setting(1, low=1)
    check_ranks: bool = setting(False)

    @property
    def counts_experts(self) -> bool:
        return self.enable_eplb or self.expert_distribution_recorder_mode is not None

    @property
    def ranks(self) -> int:
        """Processes that compute, in all replicas."""
        return self.replica_ranks * self.dp_size

    @property
    def replica_ranks(self) -> int:
        return self.tp_size * self.pp_size // self.groups

    @property
    def groups(self) -> int:
        """Of ranks that run attention apart and the rest together (DP attention)."""
        return self.dp_size if self.enable_dp_attention else 1

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nnodes

    @property
    def on_ray(self) -> bool:
        return self.use_ray or self.distributed_executor_backend == "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationSettings:
    """Prefill and decode on different engines."""

    disaggregation_mode: str = setting("null", choices=("null", "prefill", "decode", "auto"))
    disaggregation_transfer_backend: str = setting(
        "auto", choices=("auto", "cuda_ipc", "shm", "tcp", "nixl", "mooncake")
    )
    disaggregation_bootstrap_port: int = setting(8998, low=1, high=65535)
    prefill_url: str | None = setting(None)
    disaggregation_claim_timeout_s: float = setting(120.0, low=0.1)
    disaggregation_peer_timeout_s: float = setting(5.0, low=2.0)
    disaggregation_transfer_timeout_s: float = setting(30.0, low=2.0)
    disaggregation_decode_enable_radix_cache: bool = setting(False)
    disaggregation_decode_polling_interval: int = setting(1, low=1)

    @property
    def device_chunks(self) -> int:
        """Chunks of prompts for which a GPU has memory beside the KV cache, on their way between engines."""
        in_pair = self.disaggregation_mode != "null"
        return 2 if in_pair and self.disaggregation_transfer_backend in ("auto", "cuda_ipc") else 0
