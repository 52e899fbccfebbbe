"""`bough bench serving`: measures any server with OpenAI's API or SGLang's own.

Flags and figures have the names of SGLang's tool.
"""

import argparse
import asyncio
import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from bough.bench.backends import (
    BACKENDS,
    Api,
    Arrival,
    Conversation,
    HttpClient,
    HttpFailure,
    Record,
    RequestTemplate,
    ServerError,
    Turn,
    first_history,
    reaching,
)
from bough.bench.datasets import DATASETS, make_dataset
from bough.bench.driver import LEAD_S, OnProgress, Target, drive, poisson_arrivals, run_parts
from bough.bench.metrics import draw_png, headline, html_report, require_matplotlib, summarise, text_report
from bough.core.errors import SettingsError
from bough.core.files import table_beside, user_path
from bough.core.setting_checks import add_table, flag_of, json_object, require_above_zero, require_counts
from bough.tokenizer.tokenizer import Tokenizer

FLAGS = table_beside(__file__, "flags.toml")["serving"]
COUNTS = (
    "num_prompts", "procs", "random_input_len", "random_output_len", "gsp_num_groups", "gsp_prompts_per_group",
    "gsp_system_prompt_len", "gsp_question_len", "gsp_output_len", "num_turns", "max_concurrency",
    "sharegpt_output_len", "image_count", "image_pool",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    key = {"default": os.environ.get("OPENAI_API_KEY")}
    add_table(parser, FLAGS, backend={"choices": [*BACKENDS]}, dataset_name={"choices": [*DATASETS]}, api_key=key)


def check(args: argparse.Namespace) -> None:
    require_counts(args, COUNTS)
    require_above_zero(args, ("request_rate",))
    if not 0 <= args.random_range_ratio <= 1:
        raise SettingsError(f"--random-range-ratio must be between 0 and 1, got {args.random_range_ratio:g}.")
    if args.max_concurrency is not None and args.procs > args.max_concurrency:
        raise SettingsError(f"--procs {args.procs} is more than --max-concurrency {args.max_concurrency} allows.")
    for name in ("output_file", "plot", "html"):
        path = getattr(args, name)
        if path is not None and not user_path(path).resolve().parent.is_dir():
            raise SettingsError(f"{flag_of(name)}: there is no folder {Path(path).parent}.")


def shown_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What is needed to repeat the run, without secrets."""
    hidden = {"api_key", "output_file", "output_details", "plot", "html", "disable_tqdm"}
    settings = {name: value for name, value in vars(args).items() if name not in hidden}
    settings["request_rate"] = "inf" if args.request_rate == math.inf else args.request_rate
    return settings


# ---- the command


WARMUP_TOKENS = 32


def main(args: argparse.Namespace) -> int:
    check(args)
    if args.plot is not None or args.html is not None:
        require_matplotlib()
    conversations = make_dataset(args, _tokenizer(args.tokenizer))
    api = BACKENDS[args.backend]
    first_history(api, conversations[0][0].prompt)  # refused here, where the API cannot take it
    target = asyncio.run(_find_target(args, api))
    _warm_up(target, conversations[0], args.warmup_requests)
    if args.flush_cache:
        asyncio.run(_flush_cache(target))
    records = _measure(args, target, conversations)
    result = {**shown_settings(args), "model": target.template.model, **summarise(records)}
    result["accept_length"] = asyncio.run(_accept_length(target))
    if args.dataset_name == "image":
        result["image_throughput"] = result["request_throughput"] * args.image_count
    print(text_report(result))
    _write(args, result, records)
    if not result["completed"]:
        raise ServerError(f"Every request failed, the first with: {result['first_error']}")
    return 0


async def _find_target(args: argparse.Namespace, api: Api) -> Target:
    url = args.base_url or f"http://{args.host}:{args.port}"
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    with closing(HttpClient(url, headers)) as client, reaching(url):
        model = args.model or await _first_model(client, api, url)
    extra = json_object(args.extra_request_body, "extra-request-body")
    template = RequestTemplate(api, model, not args.disable_ignore_eos, not args.disable_stream, extra)
    return Target(url, headers, template)


async def _first_model(client: HttpClient, api: Api, url: str) -> str:
    response = await client.get("/v1/models")
    if response.status == 200:
        listed = msgspec.json.decode(bytes(response.body)).get("data") or []
        if listed:
            return str(listed[0]["id"])
    if api == "native":  # which asks for no model
        return ""
    raise SettingsError(f"{url}/v1/models lists no model ({response.status}); name one with --model.")


async def _flush_cache(target: Target) -> None:
    with closing(HttpClient(target.url, target.headers)) as client:
        response = await client.post("/flush_cache", {})
    if response.status != 200:
        raise ServerError(f"The server does not flush its cache ({response.status}): {response.text[:200]}")


async def _accept_length(target: Target) -> float | None:
    """Mean tokens of a decode since the server's start, where it drafts and says so as SGLang's do."""
    with closing(HttpClient(target.url, target.headers)) as client, suppress(HttpFailure, msgspec.DecodeError):
        info = msgspec.json.decode(bytes((await client.get("/server_info")).body), type=dict[str, Any])
        lengths = [each.get("avg_spec_accept_length") or 0.0 for each in info.get("internal_states") or ()]
        return sum(lengths) / len(lengths) if any(lengths) else None
    return None


def _warm_up(target: Target, conversation: Conversation, requests: int) -> None:
    first = conversation[0]
    short = (Turn(first.prompt, min(WARMUP_TOKENS, first.output_tokens), first.input_tokens),)
    arrivals = [Arrival(0.0, short)] * requests
    records = drive(target, arrivals, None, time.monotonic(), lambda answered: None)
    failed = next((record.error for record in records if not record.ok), None)
    if failed is not None:
        raise ServerError(f"The warm-up request failed: {failed}")


def _measure(args: argparse.Namespace, target: Target, conversations: Sequence[Conversation]) -> list[Record]:
    arrivals = poisson_arrivals(conversations, args.request_rate, args.seed)
    start = time.monotonic() + (LEAD_S if args.procs > 1 else 0.0)
    total = sum(map(len, conversations))

    def part(number: int, on_progress: OnProgress) -> list[Record]:
        most = args.max_concurrency
        slots = None if most is None else len(range(number, most, args.procs))
        return drive(target, arrivals[number :: args.procs], slots, start, on_progress)

    with ExitStack() as shown:

        def show_progress() -> OnProgress:
            return shown.enter_context(tqdm(total=total, disable=args.disable_tqdm, unit="request")).update

        parts = run_parts(args.procs, part, show_progress)
    return sorted((record for records in parts for record in records), key=lambda record: record.began_s)


def _write(args: argparse.Namespace, result: dict[str, Any], records: Sequence[Record]) -> None:
    if args.output_file is not None:
        line = result | (_details(records) if args.output_details else {})
        with user_path(args.output_file).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    if args.plot is None and args.html is None:
        return
    png = draw_png(records, headline(result))
    if args.plot is not None:
        try:
            user_path(args.plot).write_bytes(png)
        except OSError as error:
            raise SettingsError(f"Cannot write the picture {args.plot}: {error.strerror}.") from None
    if args.html is not None:
        user_path(args.html).write_text(html_report(result, shown_settings(args), png), encoding="utf-8")


def _details(records: Sequence[Record]) -> dict[str, list[Any]]:
    return {
        "starts": [record.began_s for record in records],
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [record.first_s for record in records],
        "latencies": [record.total_s for record in records],
        "itls": [record.gaps_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }


def _tokenizer(path: str | None) -> Tokenizer | None:
    if path is None:
        return None
    from bough.core.settings import ModelSettings
    from bough.launch.parts import open_tokenizer
    from bough.loader.locate import locate

    return open_tokenizer(locate(path), ModelSettings())
