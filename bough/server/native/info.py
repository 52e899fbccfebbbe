"""Whether the server is healthy, what it serves and how busy it is.

The figures of /v1/loads are those of /metrics, which need no key, like /health. Counts are those of all tokenizer
workers; the scheduler is asked for its state, which it returns between two steps.
"""

import asyncio
import dataclasses
import time
import uuid
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bough.client.inputs import Inputs
from bough.core.errors import RequestError
from bough.core.pooling import Pooling
from bough.messages.outputs import facts_of
from bough.observability.metrics import State, state_figures
from bough.observability.metrics_page import CONTENT_TYPE, metrics_page
from bough.observability.processes import cpu_seconds
from bough.server.context import STATE_TIMEOUT_S, ServerContext
from bough.server.endpoint import GET, Endpoint, Query, json_response
from bough.server.errors import HttpError
from bough.server.native.schemas import BriefLoad, Load, Loads, Status
from bough.tokenizer.tokenizer import Tokenizer
from bough.version import __version__

HEALTH_TIMEOUT_S = 20.0
LOOK_S = 0.5  # how often to check for other requests' tokens
HEALTH = "200 while the engine answers; 503 while it loads, drains or is stuck"
METRICS = "Counters, gauges and histograms in Prometheus' text format"
STATUS: dict[str, Any] = {"methods": GET, "answer": Status}
INFO: dict[str, Any] = {"methods": GET, "answer": dict[str, Any]}
PAGE: dict[str, Any] = {"methods": GET, "access": "open", "tag": "pages", "media_type": "text/plain"}
LOAD_QUERIES = (
    Query("include", str, "sections beside the core: memory, spec, queues; all, if nothing is said"),
    Query("format", Literal["json", "prometheus"], "prometheus: the figures as Prometheus' text instead"),
    Query("dp_rank", int, "one replica alone"),
)
# Sections of /v1/loads: figures by their names in what a replica announces, says of itself and is worked out of that.
SECTIONS = {
    "memory": {"weight_gb": "weight", "kv_cache_gb": "kvcache", "token_capacity": "token_capacity"},
    "spec": {"accept_length": "spec_accept_length", "accept_rate": "spec_accept_rate"},
    "queues": {"waiting": "num_waiting_reqs", "grammar": "num_grammar_queue_reqs", "retracted": "num_retracted_reqs"},
}


def info_routes(context: ServerContext) -> list[Endpoint]:
    well, generates = partial(health, context), partial(health_generate, context)
    info, server = partial(model_info, context), partial(server_info, context)
    version = partial(weight_version, context)
    load, brief = partial(loads, context), partial(brief_load, context)
    page: dict[str, Any] = {"answer": Loads, "other_types": ("text/plain",), "queries": LOAD_QUERIES}
    return [
        Endpoint("/health", well, HEALTH, access="open", **STATUS),
        Endpoint("/health_generate", generates, "Generate one token, to see that the whole way works", **STATUS),
        Endpoint("/model_info", info, "What is served", **INFO),
        Endpoint("/get_model_info", info, "Same as /model_info", **INFO),
        Endpoint("/weight_version", version, "The version of the weights", **INFO),
        Endpoint("/get_weight_version", version, "Same as /weight_version", **INFO),
        Endpoint("/server_info", server, "Settings, limits and load", **INFO),
        Endpoint("/get_server_info", server, "Same as /server_info", **INFO),
        Endpoint("/ping", well, "Same as /health, for SageMaker", access="open", **STATUS),
        Endpoint("/", here, "That there is a server", access="open", **STATUS),
        Endpoint("/v1/loads", load, "How busy the engine is", methods=GET, **page),
        Endpoint("/get_load", brief, "How busy the engine is, in the older form", methods=GET, answer=list[BriefLoad]),
        Endpoint("/metrics", partial(metrics, context), METRICS, **PAGE),
    ]


async def metrics(context: ServerContext, request: Request) -> Response:
    page = metrics_page(
        context.client.meter.totals(),
        await context.states(),  # metrics are missing where there is none, which is what a monitor must see
        context.model.name,
        context.settings.server.metrics_names,
        _replica_limits(context),
        await asyncio.to_thread(cpu_seconds, context.main_pid),  # looks at every process of the machine
    )
    return Response(page, headers={"content-type": CONTENT_TYPE})


def _replica_limits(context: ServerContext) -> list[dict[str, Any]]:
    """What each replica announced when it was ready, with its number where there are several."""
    if context.settings.parallel.dp_size == 1:
        return [context.model.limits]
    return [{**limits, "dp_rank": rank} for rank, limits in enumerate(context.model.replica_limits)]


async def known_states(context: ServerContext) -> list[State]:
    states = await context.states()
    if not states:
        raise HttpError(503, f"The engine did not answer within {STATE_TIMEOUT_S:g} s.", "EngineStuckError")
    return states


async def loads(context: ServerContext, request: Request) -> Response:
    form = request.query_params.get("format", "json")
    if form not in ("json", "prometheus"):
        raise RequestError(f"format must be json or prometheus, got {form!r}.", field="format")
    include = request.query_params.get("include") or "all"
    chosen = {name.strip() for name in include.split(",")}
    if not chosen <= {"core", "all", *SECTIONS}:
        known = f"core, {', '.join(SECTIONS)} or all; /metrics has figures of adapters and transfers"
        raise RequestError(f"include must be some of {known}; got {include!r}.", field="include")
    replicas, rank = context.settings.parallel.dp_size, request.query_params.get("dp_rank")
    if rank is not None and rank not in map(str, range(replicas)):
        raise RequestError(f"dp_rank must be a replica's number, 0 to {replicas - 1}; got {rank!r}.", field="dp_rank")
    states = [each for each in await known_states(context) if rank in (None, str(each.get("dp_rank", 0)))]
    if form == "prometheus":
        page = metrics_page(None, states, context.model.name, context.settings.server.metrics_names)
        return Response(page, headers={"content-type": CONTENT_TYPE})
    limits, shown = _replica_limits(context), []
    for state in states:
        of = limits[state.get("dp_rank", 0)]
        facts = {"dp_rank": 0, **of, **of["memory_usage"], **state, **state_figures(state)}
        facts["utilization"] = max(facts["token_usage"], facts["num_running_reqs"] / facts["max_running_requests"])
        for section, figures in SECTIONS.items():
            if chosen & {section, "all"} and (section != "spec" or facts["spec_verify_ct"]):  # else there are no drafts
                facts[section.replace("spec", "speculative")] = {as_: facts[name] for as_, name in figures.items()}
        shown.append(msgspec.convert(facts, Load))
    return json_response(Loads(time.time(), __version__, context.client.replica_count, shown))


async def brief_load(context: ServerContext, request: Request) -> Response:
    found = []
    for state in await known_states(context):
        running, waiting = state["num_running_reqs"], state["num_waiting_reqs"]
        found.append(BriefLoad(state.get("dp_rank", 0), running + waiting, waiting, state["num_used_tokens"]))
    return json_response(found)


async def health(context: ServerContext, request: Request) -> Response:
    if context.watchdog is not None and context.watchdog.stuck:
        raise HttpError(503, context.watchdog.message, "EngineStuckError")
    return json_response(Status("ok"))


async def here(request: Request) -> Response:
    return json_response(Status("ok"))


async def health_generate(context: ServerContext, request: Request) -> Response:
    """Any output counts, also that of others: on a busy server this one token may have to wait."""
    if context.model.limits.get("speech") and not await context.client.silent_replicas(HEALTH_TIMEOUT_S):
        return json_response(Status("ok"))  # it generates from recordings alone
    embeds = context.model.limits.get("is_embedding", False)
    inputs = context.reader.read(
        input_ids=[0],
        sampling_params={"max_new_tokens": int(not embeds), "temperature": 0},
        pooling=Pooling() if embeds else None,
        rid=f"HEALTH_CHECK_{uuid.uuid4().hex}",
    )
    inputs = dataclasses.replace(inputs, watched=False, metered=False)
    began = time.monotonic()
    task = asyncio.ensure_future(_answered(context, inputs))
    try:
        while time.monotonic() - began < HEALTH_TIMEOUT_S:
            await asyncio.wait({task}, timeout=LOOK_S)
            if task.done():
                task.result()
                return json_response(Status("ok"))
            if context.client.last_output_at > began:
                return json_response(Status("ok"))
    except RequestError as error:
        raise HttpError(503, f"The engine refuses to generate: {error.message}", "EngineStuckError") from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    raise HttpError(503, f"The engine made no token within {HEALTH_TIMEOUT_S:g} s.", "EngineStuckError")


async def _answered(context: ServerContext, inputs: Inputs) -> None:
    """Returns with the token. A full queue refuses the request, which is no hang: then other requests' tokens count."""
    try:
        await context.client.answers(inputs)
    except RequestError as error:
        if error.status_code != 429:
            raise
        await asyncio.Event().wait()


def describe_model(context: ServerContext, states: list[State]) -> dict[str, Any]:
    return {
        **context.model.to_dict(),
        "has_chat_template": context.tokenizer is not None and context.tokenizer.chat_template is not None,
        "chat_template": describe_template(context.tokenizer),
        "preferred_sampling_params": None,
        **(facts_of(states[0]) if states else {}),
    }


def describe_template(tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """All that a client needs to render conversations as the server would."""
    template = None if tokenizer is None else tokenizer.chat_template
    if tokenizer is None or template is None or not template.sources:
        return None
    return {
        "sources": template.sources,
        "variables": template.variables,
        "placeholders": template.placeholders,
        "first_token": tokenizer.first_token_text,
    }


async def model_info(context: ServerContext, request: Request) -> Response:
    return json_response(describe_model(context, await context.states()))


async def weight_version(context: ServerContext, request: Request) -> Response:
    return json_response({"weight_version": describe_model(context, await known_states(context))["weight_version"]})


async def server_info(context: ServerContext, request: Request) -> Response:
    states, limits = await context.states(), _replica_limits(context)

    def announced(of: dict[str, Any]) -> dict[str, Any]:
        told = {name: of[name] for name in ("startup_time", "memory_usage") if name in of}
        return told | {"dp_size": len(states), "effective_max_running_requests_per_dp": of.get("max_running_requests")}

    return json_response(
        {
            **context.settings.to_shown(),
            **context.model.limits,
            **describe_model(context, states),
            "version": __version__,
            "started": context.model.created,
            "internal_states": [{**state, **announced(limits[state.get("dp_rank", 0)])} for state in states],
            "dead_replicas": context.client.dead_replicas,
        }
    )
