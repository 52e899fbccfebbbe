"""Settings of an engine of several ranks or hosts, and of engines that share the work: groups of `Settings`."""

from __future__ import annotations

from dataclasses import dataclass

from bough.core.setting_checks import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """One model on several devices."""

    tp_size: int = setting(1, "ranks that share every layer (tensor parallel), each a process of its own", low=1)
    pp_size: int = setting(1, "stages that the layers are cut into (pipeline parallel), each of tp_size ranks", low=1)
    ep_size: int = setting(
        1, "runs of ranks that the experts are spread over (expert parallel); it divides --tp-size", low=1
    )
    moe_a2a_backend: str = setting(
        "none",
        "none: each rank sees all tokens, and results are summed up; torch: tokens are sent to the ranks with their "
        "experts",
        choices=("none", "torch"),
        instead=dict.fromkeys(
            ("deepep", "mooncake", "nixl", "mori", "flashinfer", "megamoe", "pplx"),
            "Bough has no such kernels, because they could not be run on its machines.",
        ),
    )
    enable_eplb: bool = setting(False, "count which experts are used, and move them so that ranks have equal loads")
    ep_num_redundant_experts: int = setting(0, "places for second copies of experts, over all ranks", low=0)
    eplb_rebalance_num_iterations: int = setting(1000, "steps between two looks at the loads of experts", low=1)
    expert_distribution_recorder_mode: str | None = setting(
        None,
        "stat: count how often each expert is chosen, for /start_expert_distribution_record; so does --enable-eplb",
        choices=("stat",),
        instead=dict.fromkeys(("stat_approx", "per_pass", "per_token"), "Bough keeps sums alone; use stat."),
    )
    dp_size: int = setting(
        1, "replicas of the model (data parallel), each a scheduler with its own cache and tp-size ranks", low=1
    )
    enable_dp_attention: bool = setting(
        False, "the replicas are groups of the tp-size ranks: attention runs in each, experts and MLPs over all"
    )
    enable_dp_lm_head: bool = setting(False, "accepted for SGLang's users; groups always have a head of their own")
    load_balance_method: str = setting(
        "auto",
        "which replica gets a request; auto goes by what each has cached and by their loads",
        choices=("auto", "round_robin", "total_requests", "total_tokens"),
        instead={"follow_bootstrap_room": "Rooms say nothing of what a replica has cached; auto goes by that."},
    )
    dist_timeout: float = setting(
        300.0, "seconds that a rank waits for the others in an exchange before the engine ends", low=1.0
    )
    nnodes: int = setting(1, "hosts that the ranks are spread over; each runs the same command", low=1)
    node_rank: int = setting(0, "which of the hosts this is; 0 serves, the others only compute", low=0)
    dist_init_addr: str | None = setting(None, "HOST:PORT of the first host, where the others find it")
    use_ray: bool = setting(False, "let Ray choose the hosts and start the ranks there; needs bough[ray]")
    distributed_executor_backend: str | None = setting(None, "ray: same as --use-ray", choices=("mp", "ray"))
    simulate_tp: int = setting(
        1, "hold one rank's share of so many, without the others: times and memory are right, answers are not", low=1
    )
    check_ranks: bool = setting(
        False, "have ranks compare their page tables and sampled tokens in every step, which is slow; for debugging"
    )

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
    """Prompts and answers on different engines."""

    disaggregation_mode: str = setting(
        "null",
        "prefill: compute prompts for other engines; decode: have them computed by prefill engines; null: do both here;"
        " auto: have those computed by --prefill-url that would wait here for others",
        choices=("null", "prefill", "decode", "auto"),
    )
    disaggregation_transfer_backend: str = setting(
        "auto",
        "how pages travel: cuda_ipc between engines of one user on one GPU, shm on one host, tcp between hosts; auto"
        " takes the first that it can; nixl or mooncake, on both engines: by that library",
        choices=("auto", "cuda_ipc", "shm", "tcp", "nixl", "mooncake"),
        instead={
            **dict.fromkeys(("mori", "ascend"), "Bough has no such transport; auto takes shm or tcp."),
            "mooncake_tcp": "Set MC_FORCE_TCP=1 and use mooncake.",
        },
    )
    disaggregation_bootstrap_port: int = setting(
        8998, "port where a prefill engine meets decode engines; of --prefill-url, the port there", low=1, high=65535
    )
    prefill_url: str | None = setting(
        None, "URL of the prefill engine of requests that name none; a prompt that it cannot compute is computed here"
    )
    disaggregation_claim_timeout_s: float = setting(120.0, "for a router's request to reach both engines", low=0.1)
    disaggregation_peer_timeout_s: float = setting(5.0, "silence after which another engine counts as gone", low=2.0)
    disaggregation_transfer_timeout_s: float = setting(30.0, "silence after which a transfer has failed", low=2.0)
    disaggregation_decode_enable_radix_cache: bool = setting(False, "accepted for SGLang's users; it is always on")
    disaggregation_decode_polling_interval: int = setting(1, "accepted for SGLang's users; nothing is polled", low=1)

    @property
    def device_chunks(self) -> int:
        """Chunks of prompts for which a GPU has memory beside the KV cache, on their way between engines."""
        in_pair = self.disaggregation_mode != "null"
        return 2 if in_pair and self.disaggregation_transfer_backend in ("auto", "cuda_ipc") else 0
