"""Settings of an engine of several ranks or hosts, and of engines that share the work: groups of `Settings`."""

from __future__ import annotations

from dataclasses import dataclass

from bough.core.setting_checks import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """One model on several devices."""

    tp_size: int = setting(1, "ranks that share every layer (tensor parallel), each a process of its own", low=1)
    pp_size: int = setting(1, "stages that the layers are cut into (pipeline parallel), each of tp_size ranks", low=1)
    ep_size: int = setting(1, "groups of ranks that share the experts (expert parallel); must divide --tp-size", low=1)
    moe_a2a_backend: str = setting(
        "none",
        "none: each rank sees all tokens, and results are summed; torch: tokens are sent to the ranks of their experts",
        choices=("none", "torch"),
    )
    enable_eplb: bool = setting(False, "count how often experts are used, and move them to balance the ranks")
    ep_num_redundant_experts: int = setting(0, "slots for second copies of experts, over all ranks", low=0)
    eplb_rebalance_num_iterations: int = setting(1000, "steps between two checks of the experts' load", low=1)
    expert_distribution_recorder_mode: str | None = setting(
        None,
        "stat: count how often each expert is chosen, for /start_expert_distribution_record; so does --enable-eplb",
        choices=("stat",),
    )
    dp_size: int = setting(1, "replicas (data parallel), each a scheduler with its own cache and tp-size ranks", low=1)
    enable_dp_attention: bool = setting(
        False, "the replicas are groups of ranks with their own attention; all ranks together run experts and MLPs"
    )
    enable_dp_lm_head: bool = setting(False, "accepted for SGLang's users; each group always has its own LM head")
    load_balance_method: str = setting(
        "auto",
        "which replica gets a request; auto goes by cached prefixes and load",
        choices=("auto", "round_robin", "total_requests", "total_tokens"),
    )
    dist_timeout: float = setting(
        300.0, "seconds that a rank waits for the others in a collective before the engine ends", low=1.0
    )
    nnodes: int = setting(1, "hosts that the ranks are spread over; each runs the same command", low=1)
    node_rank: int = setting(0, "index of this host; host 0 serves, the others only compute", low=0)
    dist_init_addr: str | None = setting(None, "HOST:PORT of the first host, to which the others connect")
    use_ray: bool = setting(False, "let Ray choose the hosts and start the ranks there; needs bough[ray]")
    distributed_executor_backend: str | None = setting(None, "ray: same as --use-ray", choices=("mp", "ray"))
    simulate_tp: int = setting(
        1, "run one rank's share of this many, without the others: times and memory are right, outputs are not", low=1
    )
    check_ranks: bool = setting(False, "compare page tables and tokens of all ranks in every step, to debug")

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

    disaggregation_mode: str = setting(
        "null",
        "prefill: compute prompts for other engines; decode: get prompts from prefill engines; null: neither; auto: "
        "send prompts that would have to wait here to --prefill-url",
        choices=("null", "prefill", "decode", "auto"),
    )
    disaggregation_transfer_backend: str = setting(
        "auto",
        "transport of KV pages: cuda_ipc between engines of one user on one GPU, shm on one host, tcp between hosts; "
        "auto takes the first available of these; nixl or mooncake use that library, on both engines",
        choices=("auto", "cuda_ipc", "shm", "tcp", "nixl", "mooncake"),
    )
    disaggregation_bootstrap_port: int = setting(
        8998, "port on which a prefill engine accepts decode engines; with --prefill-url, its port", low=1, high=65535
    )
    prefill_url: str | None = setting(
        None, "URL of the prefill engine for requests that name none; a prompt that it cannot compute is computed here"
    )
    disaggregation_claim_timeout_s: float = setting(120.0, "time for a router's request to reach both engines", low=0.1)
    disaggregation_peer_timeout_s: float = setting(5.0, "silence after which another engine counts as lost", low=2.0)
    disaggregation_transfer_timeout_s: float = setting(30.0, "silence after which a transfer has failed", low=2.0)
    disaggregation_decode_enable_radix_cache: bool = setting(False, "accepted for SGLang's users; it is always on")
    disaggregation_decode_polling_interval: int = setting(1, "accepted for SGLang's users; nothing is polled", low=1)

    @property
    def device_chunks(self) -> int:
        """Chunks of prompts for which a GPU has memory beside the KV cache, on their way between engines."""
        in_pair = self.disaggregation_mode != "null"
        return 2 if in_pair and self.disaggregation_transfer_backend in ("auto", "cuda_ipc") else 0
