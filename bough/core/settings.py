"""Every setting of an engine, in small frozen groups: the one place where a name, its default and its help are written
(those of several ranks and of the server stand in `parallel_settings` and `server_settings`).

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
CHAINS_ALONE = "accepted for SGLang's users; drafts of NGRAM are chains"
DRAFTED_ROWS = 64  # a step of more rows has tokens enough to fill a device without drafts
ALIASES: dict[str, str] = TABLES["aliases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model, and how its weights are held."""

    model_path: str | None = setting(
        None, "catalogue name, GGUF file, model folder or Hugging Face repository; the default model when left out"
    )
    model_shape: str | None = setting(
        None, "shape of a public model, served with random weights and no checkpoint", choices=MODEL_SHAPES
    )
    tokenizer_path: str | None = setting(None, "folder of the tokenizer, if it is not the model's own")
    served_model_name: str | None = setting(None, "name of the model in the API; the model's own when left out")
    weight_version: str = setting("default", "version of the weights in meta_info, until an update brings another")
    revision: str | None = setting(None, "branch, tag or commit of a Hugging Face repository")
    model_impl: str = setting(
        "auto",
        "implementation of the model: bough's (sglang is the same) or that of transformers, which is slower; auto "
        "uses the latter for models that bough does not implement",
        choices=("auto", "bough", "sglang", "transformers"),
    )
    load_format: str = setting(
        "auto",
        "format of the weight files; mistral is consolidated.safetensors with params.json, dummy makes random weights",
        choices=LOAD_FORMATS,
    )
    dtype: str = setting("auto", "number format of weights and activations", choices=DTYPES)
    quantization: str = setting(
        "auto",
        "auto may keep quantised weights quantised, none dequantises everything; fp8 quantises them on a GPU, int8 on "
        "a CPU, int4 on either",
        choices=("auto", "none", "fp8", "int8", "int4"),
    )
    context_length: int | None = setting(None, "most tokens of prompt + output; the model's own when left out", low=1)
    is_embedding: bool = setting(
        False, "return embeddings instead of text; always on for encoders, classifiers and sentence-transformers models"
    )
    json_model_override_args: str = setting("{}", "JSON object that replaces fields of config.json", as_json=True)
    trust_remote_code: bool = setting(False, "run the model's own Python code if its tokenizer needs it")
    simulate_routing: str | None = setting(
        None, "for benchmarks with random weights: spread tokens evenly over experts", choices=("uniform",)
    )
    skip_tokenizer_init: bool = setting(False, "no tokenizer: requests and answers are token ids")
    chat_template: str | None = setting(None, "a Jinja chat template, inline or a file, instead of the model's own")
    default_chat_template_kwargs: str = setting(
        "{}", "JSON object of chat template variables; a request's chat_template_kwargs override them", as_json=True
    )
    tool_call_parser: str | None = setting(
        None, "format of the model's tool calls; needed for requests with tools", choices=TOOL_CALL_PARSERS
    )
    reasoning_parser: str | None = setting(
        None, "format of the model's reasoning, by which it is separated from the answer", choices=REASONING_PARSERS
    )
    sampling_defaults: str = setting(
        "model", "source of sampling defaults: generation_config.json or OpenAI's", choices=("model", "openai")
    )
    random_seed: int | None = setting(None, "seed for requests without one; random when left out", low=0)
    device: str = setting("auto", "the model's device", choices=("auto", "cpu", "cuda"))
    attention_backend: str = setting("auto", "implementation of attention: torch, native on CPUs, triton on GPUs")
    prefill_attention_backend: str | None = setting(None, "--attention-backend for prompts, if different")
    decode_attention_backend: str | None = setting(None, "--attention-backend for decodes, if different")
    disable_cuda_graph: bool = setting(False, "launch every kernel by itself instead of replaying CUDA graphs")
    cuda_graph_max_bs_decode: int | None = setting(None, "largest decode batch with a CUDA graph", low=1)
    enable_deterministic_inference: bool = setting(False, "outputs are bit-identical in any batch, cached or not")
    cpu_threads: int | None = setting(None, "compute threads on a CPU; measured from the machine when left out", low=1)
    cpu_instruction_set: str = setting(
        "auto",
        "instruction set of the native CPU kernels; auto is the best that this CPU has",
        choices=("auto", "plain", "avx2", "avx512", "amx", "neon"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """The KV cache."""

    mem_fraction_static: float | None = setting(
        None, "share of a GPU's memory, or of a CPU's free memory, for weights and KV cache", low=0.01, high=1.0
    )
    max_total_tokens: int | None = setting(None, "size of the KV cache in tokens; measured when left out", low=1)
    swa_full_tokens_ratio: float = setting(
        0.5,
        "KV cache tokens of sliding-window layers, as a share of those of full attention; lower for long requests, "
        "higher for requests shorter than two windows",
        low=0.01,
        high=1.0,
    )
    page_size: int = setting(
        1, "tokens in a KV page; 1 shares prefixes to the token", choices=(1, 2, 4, 8, 16, 32, 64, 128)
    )
    kv_cache_dtype: str = setting(
        "auto",
        "number format of cached keys and values; auto: the activations', or float16 if a CPU has quantised weights",
        choices=("auto", "bf16", "bfloat16", "fp8_e5m2", "fp8_e4m3"),
    )
    quantization_param_path: str | None = setting(None, "JSON file that replaces the scales of an fp8 KV cache")
    mm_cache_size_mb: int = setting(
        512, "MiB on the device for encoded images, video and sound, which are reused", low=0
    )
    disable_radix_cache: bool = setting(False, "do not share prefixes between requests")
    enable_memory_saver: bool = setting(False, "accepted for SGLang's users; memory can always be released")
    kv_events_config: str | None = setting(
        None, 'publish cache events; a JSON object such as {"endpoint": "tcp://127.0.0.1:5557"}', as_json=True
    )
    radix_eviction_policy: str = setting("lru", "which cached prefix is evicted first", choices=EVICTION_POLICIES)
    enable_hierarchical_cache: bool = setting(
        False, "also keep cached prefixes in host memory, so that evicted ones need not be computed again"
    )
    hicache_ratio: float = setting(2.0, "size of the host cache, as a multiple of the KV cache", low=0.01)
    hicache_size: float = setting(0.0, "size of the host cache in GB per replica, instead of --hicache-ratio", low=0.0)
    hicache_write_policy: str = setting(
        "write_through",
        "when prefixes are copied to the host: at once, after their first cache hit, or when they are evicted",
        choices=WRITE_POLICIES,
    )
    hicache_io_backend: str = setting(
        "kernel", "accepted for SGLang's users; there is one way to copy", choices=("kernel", "direct")
    )
    hicache_mem_layout: str = setting(
        "page_first",
        "accepted for SGLang's users; all layers of a page always stand together",
        choices=("page_first", "layer_first", "page_first_direct", "page_first_kv_split", "page_head"),
    )
    hicache_storage_backend: str | None = setting(
        None,
        "also keep cached prefixes in files, `bough store`, Redis, Mooncake or LMCache's server, beyond a restart",
        choices=("file", "memory", "redis", "mooncake", "lmcache"),
    )
    hicache_storage_prefetch_policy: str = setting(
        "timeout",
        "how long a request waits for stored pages of its prompt: a limited time, until its turn, or for all",
        choices=("timeout", "best_effort", "wait_complete"),
    )
    hicache_storage_backend_extra_config: str | None = setting(
        None, 'options of the storage, as JSON such as {"max_bytes": 100000000000} or as @FILE', as_json=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What runs next."""

    max_running_requests: int | None = setting(None, "most requests in one batch", low=1)
    max_queued_requests: int | None = setting(None, "most requests waiting; one more is refused", low=0)
    chunked_prefill_size: int | None = setting(
        None,
        "most tokens in one step; longer prompts are split into chunks; -1: only --max-prefill-tokens limits them",
        low=-1,
    )
    max_prefill_tokens: int = setting(16384, "most prompt tokens in one step, whatever the chunk size", low=1)
    enable_mixed_chunk: bool = setting(True, "run decodes and prefill chunks in one step; prompts do not stall streams")
    schedule_policy: str = setting("fcfs", "order of the waiting queue", choices=SCHEDULE_POLICIES)
    schedule_conservativeness: float = setting(
        1.0, "above 1: expect longer outputs and admit fewer requests", low=0.0, high=10.0
    )
    enable_priority_scheduling: bool = setting(False, "same as --schedule-policy priority")
    schedule_low_priority_values_first: bool = setting(False, "smaller priority numbers are more urgent")
    priority_scheduling_preemption_threshold: int = setting(
        10, "a waiting request preempts a running one whose priority is lower by more than this", low=0
    )
    pp_max_micro_batch_size: int | None = setting(
        None,
        "most requests that decode in one step of a pipeline; the running requests divided by the stages when left out",
        low=1,
    )
    disable_overlap_schedule: bool = setting(False, "finish each step before the next is launched")
    disable_tree_attention: bool = setting(False, "read a shared prefix once for each request instead of once for all")
    waiting_timeout_s: float | None = setting(None, "a request that waits longer ends with an error", low=0.0)
    running_timeout_s: float | None = setting(None, "a request that runs longer ends with an error", low=0.0)
    allow_auto_truncate: bool = setting(False, "cut prompts and limits that are too long instead of refusing them")
    stream_gap_target_ms: float = setting(
        40.0,
        "while streams run, prompts are split so that a step takes about this long, 1.5 times as long while a "
        "request has waited for over a second; 0: not limited",
        low=0.0,
    )
    stream_interval: int = setting(1, "tokens in one event of a stream", low=1)
    grammar_backend: str = setting(
        "xgrammar",
        "library that compiles schemas, regexes and grammars to token masks; none: such requests are refused",
        choices=("xgrammar", "llguidance", "outlines-core", "outlines", "none"),
    )
    grammar_timeout_s: float = setting(10.0, "a request whose grammar takes longer to compile is refused", low=0.1)
    grammar_any_whitespace: bool = setting(False, "allow any whitespace in JSON instead of the usual single spaces")
    enable_custom_logit_processor: bool = setting(
        False,
        "requests may contain code that changes their logits; it can do anything, so a server also needs --api-key",
    )
    enable_return_hidden_states: bool = setting(False, "requests may ask for hidden states (return_hidden_states)")
    enable_return_routed_experts: bool = setting(
        False, "requests may ask for the experts of their tokens (return_routed_experts); on CPUs through torch"
    )
    disable_jump_forward: bool = setting(False, "also sample the tokens that a grammar forces, one by one")
    decode_log_interval: int = setting(40, "steps between two lines of the progress log; 0: no lines", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSettings:
    """Speculative decoding: drafts of several tokens, which the model verifies in one step."""

    speculative_algorithm: str | None = setting(
        None,
        "source of drafts: NGRAM is text that followed the same words before, STANDALONE a smaller model, EAGLE and "
        "EAGLE3 heads on the model's hidden states, NEXTN the model's own layer for multi-token prediction",
        choices=("NGRAM", *DRAFT_MODELS),
    )
    speculative_draft_model_path: str | None = setting(None, "smaller model or EAGLE head, as for --model-path")
    speculative_num_steps: int | None = setting(
        None,
        "draft steps of a draft model: for chains one less than --speculative-num-draft-tokens, for trees their "
        f"depth ({TREE_STEPS}) when left out",
        low=1,
        high=63,
    )
    speculative_eagle_topk: int | None = setting(
        None, "candidates of a draft model for each position: 1 makes chains, more make trees", low=1, high=16
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        f"most tokens of a request in one step, its last token and the drafts after it; when left out {NGRAM_TOKENS}, "
        f"with a draft model {MODEL_TOKENS}, with trees {TREE_TOKENS}",
        low=2,
        high=64,
    )
    speculative_adaptive: bool = setting(True, "use only as many drafts as save time; otherwise all there are")
    speculative_ngram_max_trie_depth: int = setting(
        18, "most tokens at the end of a request that are compared with earlier text", low=2, high=64
    )
    speculative_ngram_capacity: int = setting(
        65536, "tokens of finished requests that are searched besides the request's own; 0: none", low=0
    )
    speculative_ngram_match_type: str = setting("BFS", CHAINS_ALONE, choices=("BFS", "PROB"))
    speculative_ngram_min_bfs_breadth: int = setting(1, CHAINS_ALONE, low=1)
    speculative_ngram_max_bfs_breadth: int = setting(10, CHAINS_ALONE, low=1)

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

    enable_lora: bool = setting(False, "serve adapters, those of --lora-paths and those that are loaded later")
    lora_paths: str | None = setting(
        None, 'adapters to begin with: NAME=PATH, PATH, or {"lora_name", "lora_path", "pinned"} as JSON', many=True
    )
    max_loras_per_batch: int = setting(8, "most adapters that run at the same time; requests of others wait", low=1)
    lora_resolver: str | None = setting(None, "folder in which adapters that are not loaded are found by name")
    lora_backend: str = setting(
        "csgmv", "accepted for SGLang's users; there is one way", choices=("triton", "csgmv", "ascend", "torch_native")
    )
    lora_eviction_policy: str = setting("lru", "slot to reuse: least recently used or oldest", choices=("lru", "fifo"))
    max_loaded_loras: int | None = setting(None, "most adapters in memory; one more is refused", low=1)
    max_lora_rank: int | None = setting(
        None, "largest rank of an adapter, for which a GPU keeps memory; else 256, and memory for 16", low=1, high=256
    )
    lora_target_modules: str | None = setting(
        None, "modules that adapters may change, such as q_proj; all when left out, or with the word all", many=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """Images, video and sound in prompts, for models that accept them."""

    enable_multimodal: bool = setting(True, "load the model's encoders for images, video and sound")
    limit_mm_data_per_request: str = setting(
        "{}",
        'most items of each kind in a prompt, as JSON such as {"image": 4}; else 64 images, 4 clips, 16 recordings',
        as_json=True,
    )
    mm_process_config: str = setting(
        "{}", 'options by kind, as JSON such as {"image": {"max_pixels": 1048576}, "video": {"fps": 1}}', as_json=True
    )
    mm_processor_worker_num: int = setting(2, "processes that decode and preprocess media", low=1, high=64)
    mm_preprocess_cache_size_mb: int = setting(512, "MiB of preprocessed media that are kept for reuse", low=0)
    mm_max_item_mb: int = setting(64, "largest image, clip or recording as received, in MiB", low=1)
    mm_max_pixels: int = setting(64_000_000, "most pixels of an image or a frame; larger ones are refused", low=1)
    mm_max_seconds: float = setting(600.0, "longest clip or recording", low=0.1)
    mm_timeout_s: float = setting(60.0, "most seconds for fetching, and again for preprocessing, one item", low=0.1)
    allowed_media_domains: str | None = setting(
        None, "the only hosts from which media are fetched, separated by commas; these may have private addresses"
    )
    allowed_local_media_path: str | None = setting(None, "folder from which requests may read media files")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """How the engine's processes behave."""

    log_level: str = setting("info", "what is logged", choices=("debug", "info", "warning", "error"))
    start_timeout_s: float = setting(1800.0, "an engine that is not ready by then is ended", low=1.0)
    enable_step_trace: bool = setting(False, "write a Perfetto trace of the scheduler loop and the device")
    step_trace_path: str | None = setting(None, "file of the step trace; one in BOUGH_HOME when left out")


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
