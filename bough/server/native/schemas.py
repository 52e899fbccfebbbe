"""The JSON of the native routes, as data: requests are decoded into these structs, the OpenAPI page is made of them.

Management routes refuse unknown fields, because a typo must not pass silently; the others accept them, /generate with a
warning in its answer, or refuse them with --strict-fields. `null` means not given.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bough.client.outputs import Entry, Timings
from bough.core import control
from bough.core import sampling_params as sampling
from bough.server.bodies import UNSUPPORTED, fields_without_effect, unsupported
from bough.server.streaming import Resume


def _sampling_schema() -> dict[str, Any]:
    """The schema of `sampling_params`: it is read as a plain object, whose own check knows the model's defaults."""
    (_, components) = msgspec.json.schema_components([sampling.SamplingParams])
    properties: dict[str, Any] = components["SamplingParams"]["properties"]
    text = {"type": "string", "minLength": 1}
    for name in ("stop", "stop_regex"):  # a single value counts as a list of one
        properties[name] = {"anyOf": [text, {"type": "array", "items": text, "maxItems": sampling.MAX_STOPS}]}
    token = {"type": "integer", "minimum": -sampling.INT64_MAX, "maximum": sampling.INT64_MAX}
    properties["stop_token_ids"] = {"anyOf": [token, {"type": "array", "items": token}]}
    for name, low, high, _ in sampling.RANGES:
        properties[name] |= {"exclusiveMinimum" if name in sampling.ABOVE_LOWEST else "minimum": low, "maximum": high}
    properties["top_k"]["not"] = {"const": 0}
    properties["logit_bias"]["additionalProperties"] |= {"minimum": -sampling.MAX_BIAS, "maximum": sampling.MAX_BIAS}
    for name in sorted(sampling.JSON_TEXT_FIELDS):
        properties[name] = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "boolean"}]}
    properties["choices"] = {"anyOf": [text, {"type": "array", "items": text}]}
    nothing = {"type": "null"}
    properties = {name: {"anyOf": [schema, nothing]} for name, schema in properties.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


Sampling = Annotated[dict[str, Any], Meta(extra_json_schema=_sampling_schema())]


if TYPE_CHECKING:
    OtherFields = msgspec.Struct
else:
    OtherFields = fields_without_effect("OtherFields")


Media = str | dict[str, Any] | list[Any]  # a URL, data URL, base64 or file; a list of them; a list for each prompt


class GenerateBody(OtherFields, kw_only=True):
    """What to continue, and how. Exactly one of the first three is given; lists make a batch."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    input_embeds: list[list[Any]] | None = None  # vectors in the place of tokens, or lists of them
    sampling_params: Sampling | list[Sampling | None] | None = None
    rid: str | list[str | None] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: int | list[int | None] | None = None
    top_logprobs_num: int | list[int | None] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_timings: bool | None = None
    max_thinking_tokens: Annotated[int, Meta(ge=0, le=sampling.INT32_MAX)] | None = None
    require_reasoning: bool | None = None  # the grammar applies after the thinking
    priority: int | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    lora_path: str | list[str | None] | None = None  # the name of an adapter
    image_data: Media | None = None
    video_data: Media | None = None
    audio_data: Media | None = None
    resume: Resume | None = None
    custom_logit_processor: str | list[str | None] | None = None
    return_hidden_states: bool | list[bool | None] | None = None  # with --enable-return-hidden-states
    return_routed_experts: bool | list[bool | None] | None = None  # with --enable-return-routed-experts
    routed_experts_start_len: int | list[int | None] | None = None  # those of earlier tokens are left out
    session_params: dict[str, Any] | list[dict[str, Any] | None] | None = None  # id, rid, offset, replace, ...
    routed_dp_rank: int | None = None  # the replica that gets it
    data_parallel_rank: int | None = None  # the same by its older name
    bootstrap_host: str | list[str | None] | None = None  # the prefill engine, for a decode engine
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None  # None: the decode engine brings the request there itself
    ignore_eos: bool | None = None  # this and the next three: of every prompt whose sampling_params do not say
    skip_special_tokens: bool | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None  # the last ones are kept
    log_metrics: bool | None = None  # false: the request does not count in the metrics
    no_logs: bool | None = None  # true: the request is neither logged nor traced
    prompt_logprobs: Annotated[int | None, unsupported(None)] = None  # 0 asks for those of the prompt itself
    disagg_prefill_dp_rank: Annotated[int | None, unsupported(None)] = None  # 0 is a replica


class VertexBody(msgspec.Struct, forbid_unknown_fields=True):
    """Vertex AI's form of a batch: each instance has `text` or `input_ids`, and may have `image_data`; `parameters` are
    other fields of /generate."""

    instances: list[dict[str, Any]]
    parameters: dict[str, Any] | None = None


class MetaInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What is known of an output beside its text."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    num_retractions: int
    weight_version: str
    queue_time: float
    e2e_latency: float
    cached_tokens_details: dict[str, int | str | None] | None = None  # by tier, where there are several
    dp_rank: int | None = None  # of the replica, where there are several
    warnings: list[str] | None = None
    prompt_token_ids: list[int] | None = None
    input_token_logprobs: list[Entry] | None = None
    output_token_logprobs: list[Entry] | None = None
    output_token_logprobs_length: int | None = None
    input_top_logprobs: list[list[Entry] | None] | None = None
    output_top_logprobs: list[list[Entry] | None] | None = None
    input_token_ids_logprobs: list[list[Entry] | None] | None = None
    output_token_ids_logprobs: list[list[Entry] | None] | None = None
    spec_verify_ct: int | None = None
    spec_accept_length: float | None = None
    spec_accept_rate: float | None = None
    spec_num_correct_drafts: int | None = None
    spec_num_proposed_drafts: int | None = None
    spec_accept_histogram: list[int] | None = None
    timings: Timings | None = None
    hidden_states: list[list[Any]] | None = None  # [tokens, size] of the prompt, then [size] of each token
    routed_experts: str | None = None  # base64 of int32 [tokens, layers, experts of a token]


class GenerateOutput(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One output; a batch, or n > 1, gives a list of them."""

    text: str | None = None
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None


class Predictions(msgspec.Struct):
    """An output for each instance."""

    predictions: list[GenerateOutput]


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Text to turn into token ids, or the messages of a conversation, which the model's template renders first."""

    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class TokenizeOutput(msgspec.Struct):
    """The ids and how many; lists of both for a list of texts."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids to turn into text."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeOutput(msgspec.Struct):
    """The text; a list for a list of lists."""

    text: str | list[str]


class ParseCallBody(msgspec.Struct, kw_only=True):
    """A model's text, and the tools that it may call. The parser is the server's where none is given."""

    text: str
    tools: list[dict[str, Any]]
    tool_call_parser: str | None = None


class ParsedCall(msgspec.Struct):
    """A call; `tool_index` is the tool's place among the tools, `parameters` is JSON."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(msgspec.Struct):
    """The text beside the calls, and the calls."""

    normal_text: str
    calls: list[ParsedCall]


class SeparateBody(msgspec.Struct, kw_only=True):
    """A model's text. The parser is the server's where none is given."""

    text: str
    reasoning_parser: str | None = None


class Separated(msgspec.Struct):
    """The thinking, and the answer."""

    reasoning_text: str
    text: str


class Outcome(msgspec.Struct):
    """What a management route has done."""

    success: bool
    message: str


class ExpertCounts(msgspec.Struct):
    """How often each expert of each layer was chosen; layers without experts have zeros."""

    logical_count: list[list[int]]


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which requests to end: the one with this id (all samples or prompts of its call), or all."""

    rid: str | None = None
    abort_all: bool | None = None
    abort_message: str | None = None


class PauseBody(msgspec.Struct, forbid_unknown_fields=True):
    """What becomes of the requests that run: ended, sent back to the queue, or kept as they are."""

    mode: Literal["abort", "retract", "in_place"] | None = None


class UpdateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What goes with new weights. The last five are accepted for SGLang's clients: a pause outlives an update in any
    case, and captured graphs stay valid."""

    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    keep_pause: bool | None = None
    is_async: bool | None = None
    torch_empty_cache: bool | None = None
    recapture_cuda_graph: bool | None = None
    token_step: int | None = None


class DiskBody(UpdateBody):
    """Where the new weights are."""

    model_path: str
    load_format: str | None = None


class TensorBody(UpdateBody):
    """Tensors by the checkpoint's names, as safetensors in base64; those of several are taken together."""

    serialized_named_tensors: str | list[str]
    load_format: str | None = None  # "safetensors"


class IpcBody(UpdateBody):
    """Files of the engine's user, such as in /dev/shm: safetensors, or handles of CUDA tensors."""

    files: list[str] = []
    zmq_handles: Any = None  # SGLang's, which are refused with what to send


class NamedGroup(msgspec.Struct, forbid_unknown_fields=True):
    group_name: str = control.WEIGHTS_GROUP


class DistributedBody(UpdateBody):
    """What a trainer sends to a group, in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Meta(ge=0)]]]
    group_name: str = control.WEIGHTS_GROUP
    load_format: None = None


class ReadWeightBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    truncate_size: Annotated[int, Meta(ge=0)] = 100  # rows


class VersionBody(msgspec.Struct, forbid_unknown_fields=True):
    new_version: str
    abort_all_requests: bool | None = None


class WeightsOutcome(Outcome):
    """Whether the weights were updated; a 400 has the field `error` too."""

    num_paused_requests: int


class NamedAdapter(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str


class AdapterBody(NamedAdapter, kw_only=True):
    """A folder that PEFT has saved, on the server's host. A `pinned` adapter keeps its place among those that run."""

    lora_path: str
    pinned: bool | None = None


class StorageBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A store and its options, as JSON or @FILE; policies that are left out stay."""

    hicache_storage_backend: str
    hicache_storage_backend_extra_config_json: str | dict[str, Any] | None = None
    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None


class SessionBody(msgspec.Struct, forbid_unknown_fields=True):
    """`timeout`: seconds without a request after which it is closed; an hour when left out. No capacity is kept to."""

    capacity_of_str_len: int | None = None
    session_id: str | None = None
    streaming: Annotated[bool | None, UNSUPPORTED] = None
    timeout: Annotated[float, Meta(gt=0)] | None = None


class NamedSession(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str


class MemoryBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which memory is meant; all of it when left out."""

    tags: list[Literal["weights", "kv_cache"]] | None = None


class LoggingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What to log from now on; what is left out stays as it is. The last five are SGLang's, which this server cannot
    change while it runs; what SGLang's tool sends unasked is taken."""

    log_requests: bool | None = None
    log_requests_level: Literal[0, 1, 2, 3] | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    log_requests_format: Annotated[str | None, UNSUPPORTED] = None
    dump_requests_folder: Annotated[str | None, unsupported("/tmp/sglang_request_dump")] = None
    dump_requests_threshold: int | None = None  # of a folder
    dump_requests_exclude_meta_keys: Annotated[list[str] | None, UNSUPPORTED] = None
    crash_dump_folder: Annotated[str | None, UNSUPPORTED] = None


class SettingsBody(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of the engine and their new values."""

    server_args: dict[str, Any]


class SettingsOutcome(msgspec.Struct):
    """Whether the settings have changed; a 400 has the field `error` too."""

    updated: bool


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """A body without fields."""


# SGLang's benchmark sends numbers of steps as strings.
Steps = Annotated[int, Meta(ge=0, le=1_000_000)] | Annotated[str, Meta(pattern="^[0-9]{1,6}$")]
SomeSteps = Annotated[int, Meta(ge=1, le=1_000_000)] | Annotated[str, Meta(pattern="^[1-9][0-9]{0,5}$")]


class ProfileBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What to record, and where the trace goes (a folder on the server; its folder for temporary files by default)."""

    output_dir: str | None = None
    start_step: Steps | None = None
    num_steps: SomeSteps | None = None
    activities: list[Literal["CPU", "GPU", "CUDA"]] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_by_stage: bool | None = None
    profile_stages: list[str] | None = None
    profile_prefix: str | None = None
    merge_profiles: bool | None = None


class Load(msgspec.Struct):
    """How busy a replica is."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float  # the larger share in use, of tokens or of requests
    max_running_requests: int
    prefill_tokens_per_s: float | None = None  # how fast prompts are computed; null before the first
    memory: dict[str, int | float] | None = None
    speculative: dict[str, float] | None = None  # null without drafts
    queues: dict[str, int] | None = None


class Loads(msgspec.Struct):
    """The loads of all replicas of this server, or of one."""

    timestamp: float
    version: str
    dp_rank_count: int  # replicas that live
    loads: list[Load]


class BriefLoad(msgspec.Struct):
    """The load in its older form."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class Status(msgspec.Struct):
    """Whether the server can serve."""

    status: str
