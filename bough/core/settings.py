"""Every setting of an engine, in small frozen groups: the one place where a name and its default are written (those of
several ranks and of the server stand in `parallel_settings` and `server_settings`). `settings.toml` has their help.

Flags, `BOUGH_*` variables, configuration files and `Engine(...)` keywords are derived from these fields, with SGLang's
names. `None` or "auto" is decided once at start, from the model and the machine, and never written back here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bough.core.errors import SettingsError
from bough.core.parallel_settings import DisaggregationSettings, ParallelSettings
from bough.core.server_settings import ServerSettings
from bough.core.setting_checks import SECRETS, TABLES, check_value, setting, unknown_setting_text

MODEL_SHAPES = ("qwen3-0.6b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "mistral", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
EVICTION_POLICIES = ("lru", "lfu", "slru", "fifo", "mru", "priority")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "priority")
TOOL_CALL_PARSERS, REASONING_PARSERS = (tuple(TABLES["parsers"][kind].split()) for kind in ("tool_call", "reasoning"))
DRAFT_MODELS = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN")  # algorithms whose drafts the executor makes
NGRAM_TOKENS, MODEL_TOKENS = 16, 4  # of a request in one step, where the user does not say
TREE_TOKENS, TREE_STEPS = 8, 5  # the same where drafts are a tree, and how many may follow each other
STEP_DRAFTS = 256  # over all requests: more rows of a product cost more than drafts are worth
DRAFTED_ROWS = 64  # a step of more rows has tokens enough to fill a device without drafts
ALIASES: dict[str, str] = TABLES["aliases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model, and how its weights are held."""

    model_path: str | None = setting(None)
    model_shape: str | None = setting(None, choices=MODEL_SHAPES)
    tokenizer_path: str | None = setting(None)
    served_model_name: str | None = setting(None)
    weight_version: str = setting("default")
    revision: str | None = setting(None)
    model_impl: str = setting("auto", choices=("auto", "bough", "sglang", "transformers"))
    load_format: str = setting("auto", choices=LOAD_FORMATS)
    dtype: str = setting("auto", choices=DTYPES)
    quantization: str = setting("auto", choices=("auto", "none", "fp8", "int8", "int4"))
    context_length: int | None = setting(None, low=1)
    is_embedding: bool = setting(False)
    json_model_override_args: str = setting("{}", as_json=True)
    trust_remote_code: bool = setting(False)
    simulate_routing: str | None = setting(None, choices=("uniform",))
    skip_tokenizer_init: bool = setting(False)
    chat_template: str | None = setting(None)
    default_chat_template_kwargs: str = setting("{}", as_json=True)
    tool_call_parser: str | None = setting(None, choices=TOOL_CALL_PARSERS)
    reasoning_parser: str | None = setting(None, choices=REASONING_PARSERS)
    sampling_defaults: str = setting("model", choices=("model", "openai"))
    random_seed: int | None = setting(None, low=0)
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    attention_backend: str = setting("auto")
    prefill_attention_backend: str | None = setting(None)
    decode_attention_backend: str | None = setting(None)
    disable_cuda_graph: bool = setting(False)
    cuda_graph_max_bs_decode: int | None = setting(None, low=1)
    enable_deterministic_inference: bool = setting(False)
    cpu_threads: int | None = setting(None, low=1)
    cpu_instruction_set: str = setting("auto", choices=("auto", "plain", "avx2", "avx512", "amx", "neon"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """The KV cache."""

    mem_fraction_static: float | None = setting(None, low=0.01, high=1.0)
    max_total_tokens: int | None = setting(None, low=1)
    swa_full_tokens_ratio: float = setting(0.5, low=0.01, high=1.0)
    page_size: int = setting(1, choices=(1, 2, 4, 8, 16, 32, 64, 128))
    kv_cache_dtype: str = setting("auto", choices=("auto", "bf16", "bfloat16", "fp8_e5m2", "fp8_e4m3"))
    quantization_param_path: str | None = setting(None)
    mm_cache_size_mb: int = setting(512, low=0)
    disable_radix_cache: bool = setting(False)
    enable_memory_saver: bool = setting(False)
    kv_events_config: str | None = setting(None, as_json=True)
    radix_eviction_policy: str = setting("lru", choices=EVICTION_POLICIES)
    enable_hierarchical_cache: bool = setting(False)
    hicache_ratio: float = setting(2.0, low=0.01)
    hicache_size: float = setting(0.0, low=0.0)
    hicache_write_policy: str = setting("write_through", choices=WRITE_POLICIES)
    hicache_io_backend: str = setting("kernel", choices=("kernel", "direct"))
    hicache_mem_layout: str = setting(
        "page_first", choices=("page_first", "layer_first", "page_first_direct", "page_first_kv_split", "page_head")
    )
    hicache_storage_backend: str | None = setting(None, choices=("file", "memory", "redis", "mooncake", "lmcache"))
    hicache_storage_prefetch_policy: str = setting("timeout", choices=("timeout", "best_effort", "wait_complete"))
    hicache_storage_backend_extra_config: str | None = setting(None, as_json=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What runs next."""

    max_running_requests: int | None = setting(None, low=1)
    max_queued_requests: int | None = setting(None, low=0)
    chunked_prefill_size: int | None = setting(None, low=-1)
    max_prefill_tokens: int = setting(16384, low=1)
    enable_mixed_chunk: bool = setting(True)
    schedule_policy: str = setting("fcfs", choices=SCHEDULE_POLICIES)
    schedule_conservativeness: float = setting(1.0, low=0.0, high=10.0)
    enable_priority_scheduling: bool = setting(False)
    schedule_low_priority_values_first: bool = setting(False)
    priority_scheduling_preemption_threshold: int = setting(10, low=0)
    pp_max_micro_batch_size: int | None = setting(None, low=1)
    disable_overlap_schedule: bool = setting(False)
    disable_tree_attention: bool = setting(False)
    waiting_timeout_s: float | None = setting(None, low=0.0)
    running_timeout_s: float | None = setting(None, low=0.0)
    allow_auto_truncate: bool = setting(False)
    stream_gap_target_ms: float = setting(40.0, low=0.0)
    stream_interval: int = setting(1, low=1)
    grammar_backend: str = setting("xgrammar", choices=("xgrammar", "llguidance", "outlines-core", "outlines", "none"))
    grammar_timeout_s: float = setting(10.0, low=0.1)
    grammar_any_whitespace: bool = setting(False)
    enable_custom_logit_processor: bool = setting(False)
    enable_return_hidden_states: bool = setting(False)
    enable_return_routed_experts: bool = setting(False)
    disable_jump_forward: bool = setting(False)
    decode_log_interval: int = setting(40, low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSettings:
    """Speculative decoding: drafts of several tokens, which the model verifies in one step."""

    speculative_algorithm: str | None = setting(None, choices=("NGRAM", *DRAFT_MODELS))
    speculative_draft_model_path: str | None = setting(None)
    speculative_num_steps: int | None = setting(None, low=1, high=63)
    speculative_eagle_topk: int | None = setting(None, low=1, high=16)
    speculative_num_draft_tokens: int | None = setting(None, low=2, high=64)
    speculative_adaptive: bool = setting(True)
    speculative_ngram_max_trie_depth: int = setting(18, low=2, high=64)
    speculative_ngram_capacity: int = setting(65536, low=0)
    speculative_ngram_match_type: str = setting("BFS", choices=("BFS", "PROB"))
    speculative_ngram_min_bfs_breadth: int = setting(1, low=1)
    speculative_ngram_max_bfs_breadth: int = setting(10, low=1)

    @property
    def has_model(self) -> bool:
        """Whether the executor makes the drafts."""
        return self.speculative_algorithm in DRAFT_MODELS

    @property
    def most_drafts(self) -> int:
        """Of a request in one step."""
        tokens, steps = self.speculative_num_draft_tokens, self.speculative_num_steps if self.has_model else None
        if levels := self.draft_levels:
            topk = self.speculative_eagle_topk or 1
            return min((tokens or TREE_TOKENS) - 1, topk + (levels - 1) * topk * topk)  # which the tree has in all
        if steps is not None and tokens not in (None, steps + 1):
            text = f"--speculative-num-steps {steps} makes chains of {steps} drafts"
            raise SettingsError(f"{text}: leave out --speculative-num-draft-tokens, or set it to {steps + 1}.")
        return steps or (tokens or (MODEL_TOKENS if self.has_model else NGRAM_TOKENS)) - 1

    @property
    def draft_levels(self) -> int:
        """Of a tree of drafts, how many may follow each other; 0: drafts are chains."""
        return (self.speculative_num_steps or TREE_STEPS) if (self.speculative_eagle_topk or 1) > 1 else 0

    @property
    def step_drafts(self) -> int:
        """Most drafts in one step, over all requests."""
        return 0 if self.speculative_algorithm is None else STEP_DRAFTS


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """LoRA adapters, which requests select by name."""

    enable_lora: bool = setting(False)
    lora_paths: str | None = setting(None, many=True)
    max_loras_per_batch: int = setting(8, low=1)
    lora_resolver: str | None = setting(None)
    lora_backend: str = setting("csgmv", choices=("triton", "csgmv", "ascend", "torch_native"))
    lora_eviction_policy: str = setting("lru", choices=("lru", "fifo"))
    max_loaded_loras: int | None = setting(None, low=1)
    max_lora_rank: int | None = setting(None, low=1, high=256)
    lora_target_modules: str | None = setting(None, many=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """Images, video and sound in prompts, for models that accept them."""

    enable_multimodal: bool = setting(True)
    limit_mm_data_per_request: str = setting("{}", as_json=True)
    mm_process_config: str = setting("{}", as_json=True)
    mm_processor_worker_num: int = setting(2, low=1, high=64)
    mm_preprocess_cache_size_mb: int = setting(512, low=0)
    mm_max_item_mb: int = setting(64, low=1)
    mm_max_pixels: int = setting(64_000_000, low=1)
    mm_max_seconds: float = setting(600.0, low=0.1)
    mm_timeout_s: float = setting(60.0, low=0.1)
    allowed_media_domains: str | None = setting(None)
    allowed_local_media_path: str | None = setting(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """How the engine's processes behave."""

    log_level: str = setting("info", choices=("debug", "info", "warning", "error"))
    start_timeout_s: float = setting(1800.0, low=1.0)
    enable_step_trace: bool = setting(False)
    step_trace_path: str | None = setting(None)


LOSSY = "below 1.0 drafts change what is said, and here they never do"
# Settings of the scheduler that can change while it runs (/set_internal_state).
LIVE_SETTINGS = ("max_queued_requests", "waiting_timeout_s", "running_timeout_s", "decode_log_interval")


def unbuilt(default: Any, why: str = "this engine does not have it yet") -> Any:
    return setting(default, why, choices=(default,))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnbuiltSettings:
    """Settings of SGLang whose feature this engine does not have. Start scripts have them, so they are accepted at
    SGLang's default, where they ask for nothing; the help does not show them."""

    incremental_streaming_output: bool = unbuilt(False)
    pp_async_batch_depth: int = unbuilt(0)
    moe_runner_backend: str = unbuilt("auto")
    speculative_accept_threshold_single: float = unbuilt(1.0, LOSSY)
    speculative_accept_threshold_acc: float = unbuilt(1.0, LOSSY)
    speculative_token_map: str | None = unbuilt(None, "the tokens of a draft vocabulary are read from the EAGLE-3 head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    speculative: SpeculativeSettings = SpeculativeSettings()
    parallel: ParallelSettings = ParallelSettings()
    disaggregation: DisaggregationSettings = DisaggregationSettings()
    lora: LoraSettings = LoraSettings()
    media: MediaSettings = MediaSettings()
    process: ProcessSettings = ProcessSettings()
    server: ServerSettings = ServerSettings()
    unbuilt: UnbuiltSettings = UnbuiltSettings()

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> Settings:
        """Sorts flat names into their groups; an unknown or unusable one is an error that says what would be right."""
        values = dict(values)
        for alias in ALIASES.keys() & values.keys():
            name, value = ALIASES[alias], values.pop(alias)
            if value is not None and values.get(name) not in (None, value):
                raise SettingsError(f"{alias} and {name} are the same setting; give one of them.")
            if value is not None:
                values[name] = value
        known = {f.name: (group, f) for group, f in all_fields()}
        chosen: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name not in known:
                raise SettingsError(unknown_setting_text(name, list(known)))
            group, f = known[name]
            chosen.setdefault(group, {})[name] = check_value(f, value)
        return cls(**{name: group(**chosen.get(name, {})) for name, group in GROUPS.items()})

    def to_flat(self) -> dict[str, Any]:
        """The inverse of `from_flat`: what a child process is given."""
        return {f.name: getattr(getattr(self, group), f.name) for group, f in all_fields()}

    def to_shown(self) -> dict[str, Any]:
        """`to_flat` for anybody to see: a key shows only that there is one, and so does what may hold a password."""
        flat, hidden = self.to_flat(), (*SECRETS, "hicache_storage_backend_extra_config")
        return flat | {name: "***" for name in hidden if flat.get(name) is not None}


GROUPS: dict[str, type[Any]] = {f.name: type(f.default) for f in dataclasses.fields(Settings)}


def all_fields() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(group name, field) of every setting, in the order of the help page."""
    for name, group in GROUPS.items():
        for f in dataclasses.fields(group):
            yield name, f
