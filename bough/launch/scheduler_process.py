"""The scheduler process: the model, the loop that feeds it, and the channels to the others."""

import gc
import logging
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from bough.core.child_environment import settle_garbage
from bough.core.files import user_path
from bough.core.plan import Limits
from bough.core.settings import ProcessSettings, Settings
from bough.launch.disaggregation import open_handover
from bough.launch.grammars import GrammarDesk
from bough.launch.kv_events import KVEventPublisher
from bough.launch.parts import adapter_paths, end_ids, has_text, open_tokenizer
from bough.launch.spec import ChildSpec
from bough.loader.catalogue import home
from bough.loader.locate import fingerprint
from bough.memory.tree.events import parse_config
from bough.messages.channels import ClientSenders, Receiver, Sender
from bough.messages.requests import Garbled, JoinStep, ToScheduler
from bough.observability.logs import set_up_logging
from bough.observability.step_trace import StepTrace, default_trace_path
from bough.version import __version__

if TYPE_CHECKING:
    from bough.scheduler.handover import Handover
    from bough.scheduler.ports import Inbox, Outbox

log = logging.getLogger(__name__)

THREADS = 4  # of ZeroMQ in a pair, whose pages they encrypt and copy
COMPUTED_BY = (
    *("model_impl", "load_format", "dtype", "quantization", "context_length", "json_model_override_args"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "cpu_instruction_set"),
    *("enable_deterministic_inference", "simulate_routing"),
)


class ChannelOutbox:
    def __init__(self, detokenizer: Sender, clients: ClientSenders) -> None:
        self.tokens, self.reply = detokenizer.send, clients.reply


def open_trace(settings: ProcessSettings, dp_rank: int | None) -> StepTrace | None:
    """The step trace, if one is asked for; naming its file asks for it. Replicas have a file each."""
    if not settings.enable_step_trace and settings.step_trace_path is None:
        return None
    chosen = settings.step_trace_path
    path = default_trace_path(home()) if chosen is None else user_path(chosen).absolute()
    trace = StepTrace(path if dp_rank is None else path.with_stem(f"{path.stem}-DP{dp_rank}"))
    log.info("the step trace is written to %s", trace.path)
    return trace


def memory_usage(limits: Limits, weight_bytes: int, ranks: Sequence[int]) -> dict[str, Any]:
    """What the engine's memory is used for, in GiB, and how many tokens the cache holds; SGLang's names."""
    cache_bytes = sum(pages * size for pages, size in zip(limits.pages, limits.page_bytes, strict=False))
    weight, kvcache, *of_ranks = (round(nbytes / 2**30, 3) for nbytes in (weight_bytes, cache_bytes, *ranks))
    windows = [pages for pages, group in zip(limits.pages, limits.groups, strict=False) if group.kind == "window"]
    return {
        "weight": weight,
        **({"weight_of_ranks": of_ranks} if len(ranks) > 1 else {}),
        "kvcache": kvcache,
        "token_capacity": limits.pages[0] * limits.page_size,
        "token_capacity_swa": windows[0] * limits.page_size if windows else None,
    }


def identity_of(spec: ChildSpec, settings: Settings) -> list[str]:
    """What keys and values of given tokens depend on, beside the layout of pages."""
    from bough.executor.build import resolve_device

    model, scales = settings.model, settings.memory.quantization_param_path
    chosen = [str(getattr(model, name)) for name in COMPUTED_BY]
    chosen.append(str(settings.speculative.speculative_draft_model_path))  # its keys and values are in the pages, too
    given = "" if scales is None else Path(scales).read_text()
    weights, device = model.model_shape or fingerprint(spec.files), resolve_device(model).type
    return [__version__, weights, given, device, platform.machine(), *chosen]


def run_scheduler(spec: ChildSpec, announce: Callable[..., None]) -> None:
    began = time.monotonic()
    settings = spec.parse_settings()
    set_up_logging(spec.title, settings.process.log_level)
    context: zmq.Context[Any] = zmq.Context(1 if settings.disaggregation.disaggregation_mode == "null" else THREADS)
    addresses, ways, key = spec.addresses, spec.listeners, spec.cluster_key
    receiver: Receiver[Any] = Receiver(context, addresses.scheduler, ToScheduler | JoinStep, Garbled, None, ways, key)
    inbox: Inbox = receiver
    outbox = ChannelOutbox(Sender(context, addresses.detokenizer), ClientSenders(context, addresses, key))

    events = None
    if settings.memory.kv_events_config is not None:
        events = KVEventPublisher(parse_config(settings.memory.kv_events_config))

    trace = open_trace(settings.process, spec.dp_rank)

    from bough.sampling.custom_logit_processor import load_processor
    from bough.scheduler.adapters import Adapters
    from bough.scheduler.loop import Scheduler
    from bough.scheduler.ngram import NgramProposer

    build_executor = resolve_name(spec.executor)
    gc.freeze()  # the modules stay: collections while the model loads need not look at them
    gc.enable()
    imported = time.monotonic()
    if spec.addresses.ranks or spec.dp_rank is not None:
        from bough.executor.lockstep import LockstepExecutor, LockstepInbox
        from bough.launch.rank_process import lead_ranks

        loaded = lead_ranks(spec, settings, context, build_executor)
        if isinstance(loaded.executor, LockstepExecutor):
            inbox = LockstepInbox(receiver.receive, loaded.executor)
    else:
        loaded = build_executor(spec.files, settings)
    limits = loaded.executor.limits()
    log.info("%s", limits.note)
    eos_ids = end_ids(spec.files, loaded.config, settings.model)
    grammars = None
    if has_text(settings.model):
        reads = partial(open_tokenizer, spec.files, settings.model)
        grammars = GrammarDesk(reads, eos_ids, limits.vocab_size, settings.scheduler)
    host = None
    if settings.memory.enable_hierarchical_cache:
        from bough.executor.host_memory import host_memory

        host = loaded.host or host_memory(limits, settings)
    speculative = settings.speculative
    handover: Handover | None = None
    tier = None
    way_out: Outbox = outbox
    if host is not None and not loaded.host and settings.parallel.pp_size == 1:  # whole pages: a store may come later
        from bough.storage.tier import StoreBehind, open_tier

        handover = tier = open_tier(limits, settings.memory, identity_of(spec, settings))
        tier.reply = outbox.reply
    if settings.disaggregation.disaggregation_mode != "null":
        handover, inbox, way_out = open_handover(spec, settings, loaded.executor, context, (receiver, outbox))
        handover = handover if tier is None else StoreBehind(handover, tier)
    names = (settings.model.served_model_name or spec.files.name, "default")
    adapters = Adapters(loaded.executor if settings.lora.enable_lora else None, settings.lora, names)
    for given in adapter_paths(settings.lora.lora_paths):
        adapters.load(*given)
    scheduler = Scheduler(
        loaded.executor,
        inbox,
        way_out,
        memory=settings.memory,
        settings=settings.scheduler,
        eos_ids=eos_ids,
        events=events,
        timeline=trace,
        grammars=grammars,
        proposer=NgramProposer(speculative) if speculative.speculative_algorithm == "NGRAM" else None,
        load_processor=load_processor if settings.scheduler.enable_custom_logit_processor else None,
        host=host,
        handover=handover,
        adapters=adapters,
        weight_version=settings.model.weight_version,
        seed=secrets.randbits(32) if settings.model.random_seed is None else settings.model.random_seed,
    )
    settle_garbage()
    announce(
        ready={
            "max_total_num_tokens": limits.pages[0] * limits.page_size,
            "context_length": limits.context_length,
            "vocab_size": limits.vocab_size,
            "max_running_requests": limits.rows,
            "chunked_prefill_size": limits.chunk_tokens,
            "page_size": limits.page_size,
            "architecture": loaded.config.architecture,
            "is_embedding": limits.vectors is not None,
            "labels": [] if limits.vectors is None else list(limits.vectors.labels),
            "speech": None if limits.speech is None else msgspec.to_builtins(limits.speech),
            "memory_note": limits.note,
            "import_time_s": round(imported - began, 3),
            "load_time_s": round(time.monotonic() - imported, 3),
            "startup_time": {
                "load_weight": round(loaded.load_s, 3),
                "scheduler_e2e": round(time.monotonic() - began, 3),
            },
            "memory_usage": memory_usage(limits, loaded.weight_bytes, loaded.rank_weight_bytes),
        }
    )
    scheduler.run()
    for part in (tier, loaded.executor, grammars, trace, events):
        if part is not None:
            part.close()
    context.destroy(linger=500)
