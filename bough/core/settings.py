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
from bough.core.setting_checks import SECRETS, check_value, setting, unknown_setting_text

MODEL_SHAPES = ("qwen3-0.6b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "mistral", "dummy")
# What to do instead of other engines' values.
LOAD_INSTEAD = {
    **dict.fromkeys(("pt", "npcache"), "Pickled weights can run code of their own: save them as safetensors."),
    **dict.fromkeys(("fastsafetensors", "runai_streamer", "layered"), "safetensors reads the same files in pieces."),
    **dict.fromkeys(("sharded_state", "tensorizer"), "Give the safetensors folder that it was made from."),
    **dict.fromkeys(("remote", "remote_instance"), "Fetch the files first, or name a Hugging Face repository."),
    "bitsandbytes": "auto reads what bitsandbytes has quantised.",
}
DTYPES = ("auto", "float32", "bfloat16", "float16")
EVICTION_POLICIES = ("lru", "lfu", "slru", "fifo", "mru", "priority")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "priority")
# The formats of `bough.parsers`, by the names that SGLang gives them.
TOOL_CALL_PARSERS = (
    "apertus2509", "cohere_command4", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4", "dots", "gemma4",
    "gigachat3", "glm", "glm45", "glm47", "gpt-oss", "hermes", "hunyuan", "inkling", "interns1", "kimi_k2", "kimi_k3",
    "lfm2", "llama3", "mimo", "minicpm5", "minimax-m2", "minimax-m3", "mistral", "muse", "poolside_v1", "pythonic",
    "qwen", "qwen25", "qwen3_coder", "step3", "step3p5", "trinity",
)  # fmt: skip
REASONING_PARSERS = (
    "apertus2509", "cohere_command4", "deepseek-r1", "deepseek-v3", "deepseek-v4", "dots", "gemma4", "glm45",
    "gpt-oss", "hunyuan", "inkling", "interns1", "kimi", "kimi_k2", "kimi_k3", "mimo", "minimax",
    "minimax-append-think", "minimax-m3", "mistral", "muse", "nemotron_3", "poolside_v1", "qwen3", "qwen3-thinking",
    "step3", "step3p5",
)  # fmt: skip
DRAFT_MODELS = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN")  # algorithms whose drafts the executor makes
NGRAM_TOKENS, MODEL_TOKENS = 8, 4  # of a request in one step, where the user does not say
TREE_TOKENS, TREE_STEPS = 8, 5  # the same where drafts are a tree, and how many may follow each other
STEP_DRAFTS = 256  # over all requests: more rows of a product cost more than drafts are worth
CHAINS_ALONE = "accepted for SGLang's users; drafts of NGRAM are chains"
DRAFTED_ROWS = 64  # a step of more rows has tokens enough to fill a device without drafts
# What other engines are told of a quantised checkpoint.
CHECKPOINT_SCHEMES = (
    "awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "gguf", "gptq", "gptq_marlin", "modelopt",
    "modelopt_fp4", "modelopt_fp8", "moe_wna16", "mxfp4", "w8a8_fp8", "w8a8_int8",
)  # fmt: skip
# Other names of settings, everywhere.
ALIASES = {
    "model": "model_path",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "nccl_init_addr": "dist_init_addr",
    "speculative_draft_model": "speculative_draft_model_path",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model, and how its weights are held."""

    model_path: str | None = setting(
        None, "catalogue name, GGUF file, model folder or Hugging Face repository; the default model when left out"
    )
    model_shape: str | None = setting(
        None, "shape of a public model, served with random weights and no checkpoint", choices=MODEL_SHAPES
    )
    tokenizer_path: str | None = setting(None, "folder of another tokenizer than the model's own")
    served_model_name: str | None = setting(None, "name that the engine gives itself; the model's own when left out")
    revision: str | None = setting(None, "branch, tag or commit of a Hugging Face repository")
    model_impl: str = setting(
        "auto",
        "whose modules compute: bough's own (sglang means the same) or those of transformers, which are slower; auto "
        "takes the latter for models that bough has no file for",
        choices=("auto", "bough", "sglang", "transformers"),
    )
    load_format: str = setting(
        "auto",
        "what the weights are read from; mistral is consolidated.safetensors with params.json, dummy makes random ones",
        choices=LOAD_FORMATS,
        instead=LOAD_INSTEAD,
    )
    dtype: str = setting("auto", "number format of weights and activations", choices=DTYPES)
    quantization: str = setting(
        "auto",
        "auto may keep quantised weights quantised, none dequantises everything; fp8 quantises them on a GPU, int8 on "
        "a CPU, int4 on either",
        choices=("auto", "none", "fp8", "int8", "int4"),
        instead=dict.fromkeys(
            CHECKPOINT_SCHEMES, "The scheme of a quantised checkpoint is read from it; leave --quantization out."
        ),
    )
    context_length: int | None = setting(
        None, "longest prompt + output, in tokens; the model's own when left out", low=1
    )
    is_embedding: bool = setting(
        False, "give vectors instead of text; encoders, classifiers and models of sentence-transformers do so anyway"
    )
    json_model_override_args: str = setting("{}", "JSON object laid over the model's own config.json")
    trust_remote_code: bool = setting(
        False, "run code that the model's folder brings along for its tokenizer, where nothing else reads its files"
    )
    simulate_routing: str | None = setting(
        None, "for benchmarks with random weights: tokens choose their experts evenly", choices=("uniform",)
    )
    skip_tokenizer_init: bool = setting(False, "no tokenizer: requests and answers are token ids")
    chat_template: str | None = setting(None, "a Jinja chat template, inline or a file, instead of the model's own")
    default_chat_template_kwargs: str = setting(
        "{}", "JSON object of variables for the chat template; those of a request's chat_template_kwargs win"
    )
    tool_call_parser: str | None = setting(
        None, "format in which the model writes calls of tools; requests with tools need it", choices=TOOL_CALL_PARSERS
    )
    reasoning_parser: str | None = setting(
        None, "format in which the model sets its thinking apart from its answer", choices=REASONING_PARSERS
    )
    sampling_defaults: str = setting(
        "model", "where defaults of sampling come from: generation_config.json, or none", choices=("model", "openai")
    )
    random_seed: int | None = setting(None, "seed for requests that give none; drawn at start when left out", low=0)
    device: str = setting("auto", "what the model runs on", choices=("auto", "cpu", "cuda"))
    attention_backend: str = setting("auto", "implementation of attention: torch, native on CPUs, triton on GPUs")
    prefill_attention_backend: str | None = setting(None, "implementation of attention for prompts, if another")
    decode_attention_backend: str | None = setting(None, "implementation of attention for decodes, if another")
    disable_cuda_graph: bool = setting(False, "launch every kernel of a step by itself")
    cuda_graph_max_bs_decode: int | None = setting(None, "largest decode batch with a CUDA graph", low=1)
    enable_deterministic_inference: bool = setting(
        False, "the same request gives the same bits in any batch, cached or not"
    )
    cpu_threads: int | None = setting(None, "compute threads on a CPU; measured from the machine when left out", low=1)
    cpu_instruction_set: str = setting(
        "auto",
        "instructions that the native CPU kernels may use; auto is all this CPU has",
        choices=("auto", "plain", "avx2", "avx512", "amx", "neon"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """The KV cache."""

    mem_fraction_static: float | None = setting(
        None, "share of a GPU's memory, or of a CPU's free memory, for weights and KV cache", low=0.01, high=1.0
    )
    max_total_tokens: int | None = setting(None, "size of the KV cache in tokens, instead of measuring", low=1)
    swa_full_tokens_ratio: float = setting(
        0.5,
        "tokens of layers with a sliding window that the KV cache holds, for each token of full attention; lower for "
        "long requests, higher for requests shorter than two windows",
        low=0.01,
        high=1.0,
    )
    page_size: int = setting(
        1, "tokens in a KV page; 1 shares prefixes to the token", choices=(1, 2, 4, 8, 16, 32, 64, 128)
    )
    kv_cache_dtype: str = setting(
        "auto",
        "number format of cached keys and values; auto is that of the activations, float16 beside quantised weights on "
        "a CPU",
        choices=("auto", "bf16", "bfloat16", "fp8_e5m2", "fp8_e4m3"),
    )
    quantization_param_path: str | None = setting(
        None, "JSON file with the scales of an fp8 KV cache, instead of the checkpoint's own"
    )
    mm_cache_size_mb: int = setting(
        512, "MiB of what encoders made of images and the like that the device keeps for when they come again", low=0
    )
    disable_radix_cache: bool = setting(False, "share no prefixes between requests")
    enable_memory_saver: bool = setting(
        False, "accepted for SGLang's users; memory can always be released (/release_memory_occupation)"
    )
    kv_events_config: str | None = setting(
        None, 'JSON object that turns on the publishing of cache events, such as {"endpoint": "tcp://127.0.0.1:5557"}'
    )
    radix_eviction_policy: str = setting("lru", "which cached prefix goes first", choices=EVICTION_POLICIES)
    enable_hierarchical_cache: bool = setting(
        False, "keep copies of cached prefixes in memory of the host, for when the KV cache has no room for them"
    )
    hicache_ratio: float = setting(2.0, "size of that memory, as a multiple of the KV cache's", low=0.01)
    hicache_size: float = setting(0.0, "its size in GB, for each replica, instead of a multiple", low=0.0)
    hicache_write_policy: str = setting(
        "write_through",
        "when prefixes are copied there: at once, when they have been found again, or when they leave the KV cache",
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
        "keep cached prefixes also in files, with `bough store`, Redis or Mooncake, where they outlive the engine",
        choices=("file", "memory", "redis", "mooncake"),
        instead={
            "lmcache": "Its server neither bounds what it keeps nor removes a damaged run; use redis, memory or file."
        },
    )
    hicache_storage_prefetch_policy: str = setting(
        "timeout",
        "how long a request waits for what is stored of its prompt: for a while, until its turn, or for all of it",
        choices=("timeout", "best_effort", "wait_complete"),
    )
    hicache_storage_backend_extra_config: str | None = setting(
        None, 'options of the storage, as JSON such as {"max_bytes": 100000000000} or as @FILE'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What runs next."""

    max_running_requests: int | None = setting(None, "most requests in one batch", low=1)
    max_queued_requests: int | None = setting(None, "most requests waiting; one more is refused", low=0)
    chunked_prefill_size: int | None = setting(
        None,
        "most tokens computed in one step; longer prompts go in chunks; -1: as long as --max-prefill-tokens allows",
        low=-1,
    )
    max_prefill_tokens: int = setting(16384, "most prompt tokens in one step, whatever the chunk", low=1)
    enable_mixed_chunk: bool = setting(True, "decodes ride along with prefill chunks, so prompts never stall streams")
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
        "most rows that decode in one step of a pipeline; those that run, divided by its stages, when left out",
        low=1,
    )
    disable_overlap_schedule: bool = setting(False, "commit each step before the next is launched")
    disable_tree_attention: bool = setting(
        False, "read a prefix that running requests share once for each of them, not once for all"
    )
    waiting_timeout_s: float | None = setting(None, "a request that waits longer ends with an error", low=0.0)
    running_timeout_s: float | None = setting(None, "a request that runs longer ends with an error", low=0.0)
    allow_auto_truncate: bool = setting(False, "cut too long prompts and token limits instead of refusing them")
    stream_gap_target_ms: float = setting(
        40.0,
        "while streams run, prompts are cut so that a step takes about this long, half as long again while requests "
        "wait for over a second; 0: never",
        low=0.0,
    )
    stream_interval: int = setting(1, "tokens between two pieces of a stream", low=1)
    grammar_backend: str = setting(
        "xgrammar",
        "what turns schemas, regexes and grammars into masks of tokens; with none, requests that have one are refused",
        choices=("xgrammar", "llguidance", "outlines-core", "outlines", "none"),
    )
    grammar_timeout_s: float = setting(
        10.0, "a grammar that takes longer to compile is refused, its request alone", low=0.1
    )
    grammar_any_whitespace: bool = setting(
        False, "JSON may be written with any blanks, not only one after each comma and colon"
    )
    enable_custom_logit_processor: bool = setting(
        False,
        "requests may bring code that changes their logits; it may do anything, so a server needs --api-key beside it",
    )
    enable_return_hidden_states: bool = setting(
        False, "requests may ask for the hidden states of their tokens (return_hidden_states)"
    )
    enable_return_routed_experts: bool = setting(
        False, "requests may ask for the experts of their tokens (return_routed_experts); on CPUs through torch"
    )
    disable_jump_forward: bool = setting(False, "sample also the tokens that a grammar forces, one by one")
    decode_log_interval: int = setting(40, "steps between two lines of the progress log; 0 for none", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSettings:
    """Several tokens of a request in one step: guesses (drafts), of which the model keeps what it would have said."""

    speculative_algorithm: str | None = setting(
        None,
        "who guesses: NGRAM looks for what followed the same words before, STANDALONE is a smaller model, EAGLE and "
        "EAGLE3 are heads that read the model's hidden states, NEXTN is the model's own layer for further tokens",
        choices=("NGRAM", *DRAFT_MODELS),
    )
    speculative_draft_model_path: str | None = setting(
        None, "the smaller model, or the EAGLE head: as --model-path names models"
    )
    speculative_num_steps: int | None = setting(
        None,
        "drafts that a draft model makes one after the other: of a chain one less than the tokens of a step, of a tree "
        f"its depth, {TREE_STEPS} when left out",
        low=1,
        high=63,
    )
    speculative_eagle_topk: int | None = setting(
        None, "drafts that a draft model makes for each place: 1 makes chains, more make trees", low=1, high=16
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        f"most tokens of a request in one step: its last one and the drafts behind it; {NGRAM_TOKENS} when left out, "
        f"{MODEL_TOKENS} with a draft model, {TREE_TOKENS} of a tree",
        low=2,
        high=64,
    )
    speculative_adaptive: bool = setting(
        True, "only as many drafts as make the step worth its time; otherwise as many as there are"
    )
    speculative_ngram_max_trie_depth: int = setting(
        18, "most tokens at the end of a request that are compared with earlier ones", low=2, high=64
    )
    speculative_ngram_capacity: int = setting(
        65536, "tokens of ended requests that are searched besides the request's own; 0: none", low=0
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
    """LoRA adapters, which change the model for the requests that choose them."""

    enable_lora: bool = setting(False, "serve adapters, those of --lora-paths and those that are loaded later")
    lora_paths: str | None = setting(
        None, 'adapters to begin with: NAME=PATH, PATH, or {"lora_name", "lora_path", "pinned"} as JSON', many=True
    )
    max_loras_per_batch: int = setting(8, "most adapters that run at the same time; requests of others wait", low=1)
    lora_resolver: str | None = setting(None, "folder where adapters that are not loaded are looked up by their names")
    lora_backend: str = setting(
        "csgmv", "accepted for SGLang's users; there is one way", choices=("triton", "csgmv", "ascend", "torch_native")
    )
    lora_eviction_policy: str = setting("lru", "whose slot goes: used longest ago or first in", choices=("lru", "fifo"))
    max_loaded_loras: int | None = setting(None, "most adapters in memory; one more is refused", low=1)
    max_lora_rank: int | None = setting(
        None, "largest rank of an adapter, for which a GPU keeps memory; else 256, and memory for 16", low=1, high=256
    )
    lora_target_modules: str | None = setting(
        None, "modules that adapters may change, such as q_proj; all when left out, or with the word all", many=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSettings:
    """Images, video and sound in prompts, of models that take them."""

    enable_multimodal: bool = setting(True, "load what a model has for images, video and sound beside its text")
    limit_mm_data_per_request: str = setting(
        "{}", 'most items of each kind in one prompt, as JSON such as {"image": 4}; 64 images, 4 clips, 16 recordings'
    )
    mm_process_config: str = setting(
        "{}", 'options of preparation by kind, as JSON such as {"image": {"max_pixels": 1048576}, "video": {"fps": 1}}'
    )
    mm_processor_worker_num: int = setting(2, "processes that decode and prepare media", low=1, high=64)
    mm_preprocess_cache_size_mb: int = setting(512, "MiB of prepared media that are kept for the next request", low=0)
    mm_max_item_mb: int = setting(64, "largest image, clip or recording, in MiB, as it comes", low=1)
    mm_max_pixels: int = setting(64_000_000, "most pixels of an image, or of a frame, before it is made smaller", low=1)
    mm_max_seconds: float = setting(600.0, "longest clip or recording", low=0.1)
    mm_timeout_s: float = setting(60.0, "most seconds for fetching, and then for preparing, one item", low=0.1)
    allowed_media_domains: str | None = setting(
        None, "hosts that media are fetched from, separated by commas, and no others; these may have private addresses"
    )
    allowed_local_media_path: str | None = setting(None, "folder below which requests may name files")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """How the engine's processes behave."""

    log_level: str = setting("info", "what is logged", choices=("debug", "info", "warning", "error"))
    start_timeout_s: float = setting(1800.0, "an engine that is not ready by then is ended", low=1.0)
    enable_step_trace: bool = setting(False, "write when the loop and the device did what, for Perfetto to show")
    step_trace_path: str | None = setting(None, "file that the step trace goes to; one in BOUGH_HOME when left out")


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
        """`to_flat` for anybody to see: a key shows only that there is one."""
        flat = self.to_flat()
        return flat | {name: "***" for name in SECRETS if flat.get(name) is not None}


GROUPS: dict[str, type[Any]] = {f.name: type(f.default) for f in dataclasses.fields(Settings)}


def all_fields() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(group name, field) of every setting, in the order of the help page."""
    for name, group in GROUPS.items():
        for f in dataclasses.fields(group):
            yield name, f
