"""`bough bench serving`: drives any server over HTTP and reports how it did.

Works with Bough, SGLang, vLLM, llama.cpp's server and everything else that speaks OpenAI's API or SGLang's own. The
load is a data set with Poisson arrivals or a limit of requests at once; the figures are those of SGLang's tool.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from bough.bench.backends import BACKENDS, Api, RequestTemplate, first_history
from bough.bench.datasets import make_dataset
from bough.bench.driver import LEAD_S, Target, drive, poisson_arrivals
from bough.bench.http_client import HttpClient, ServerError, reaching
from bough.bench.load import Arrival, Conversation, Record, Turn
from bough.bench.metrics import headline, summarise, text_report
from bough.bench.plots import draw_png, html_report, require_matplotlib
from bough.bench.processes import OnProgress, run_parts
from bough.bench.serving_flags import add_flags, check, data_options, extra_body, shown_settings
from bough.core.errors import SettingsError
from bough.tokenizer.tokenizer import Tokenizer

__all__ = ["add_flags", "main"]

WARMUP_TOKENS = 32


def main(args: argparse.Namespace) -> int:
    check(args)
    if args.plot is not None or args.html is not None:
        require_matplotlib()
    conversations = make_dataset(data_options(args), _tokenizer(args.tokenizer))
    api = BACKENDS[args.backend]
    first_history(api, conversations[0].turns[0].prompt)  # refused here, where the API cannot take it
    target = asyncio.run(_find_target(args, api))
    _warm_up(target, conversations[0], args.warmup_requests)
    if args.flush_cache:
        asyncio.run(_flush_cache(target))
    records = _measure(args, target, conversations)
    result = {**shown_settings(args), "model": target.template.model, **summarise(records)}
    print(text_report(result))
    _write(args, result, records)
    if not result["completed"]:
        raise ServerError(f"Every request failed, the first with: {result['first_error']}")
    return 0


async def _find_target(args: argparse.Namespace, api: Api) -> Target:
    url = args.base_url or f"http://{args.host}:{args.port}"
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    client = HttpClient(url, headers)
    try:
        with reaching(url):
            model = args.model or await _first_model(client, api, url)
    finally:
        client.close()
    template = RequestTemplate(api, model, not args.disable_ignore_eos, not args.disable_stream, extra_body(args))
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
    client = HttpClient(target.url, target.headers)
    try:
        response = await client.post("/flush_cache", {})
    finally:
        client.close()
    if response.status != 200:
        raise ServerError(f"The server does not flush its cache ({response.status}): {response.text[:200]}")


def _warm_up(target: Target, conversation: Conversation, requests: int) -> None:
    """The first prompt, a few tokens long; a server that cannot do that need not be measured."""
    first = conversation.turns[0]
    short = Conversation((Turn(first.prompt, min(WARMUP_TOKENS, first.output_tokens), first.input_tokens),))
    arrivals = [Arrival(0.0, short)] * requests
    records = drive(target, arrivals, None, time.monotonic(), lambda answered: None)
    failed = next((record.error for record in records if not record.ok), None)
    if failed is not None:
        raise ServerError(f"The warm-up request failed: {failed}")


def _measure(args: argparse.Namespace, target: Target, conversations: Sequence[Conversation]) -> list[Record]:
    arrivals = poisson_arrivals(conversations, args.request_rate, args.seed)
    start = time.monotonic() + (LEAD_S if args.procs > 1 else 0.0)
    total = sum(len(conversation.turns) for conversation in conversations)

    def part(number: int, on_progress: OnProgress) -> list[Record]:
        slots = None
        if args.max_concurrency is not None:
            slots = len(range(number, args.max_concurrency, args.procs))
        return drive(target, arrivals[number :: args.procs], slots, start, on_progress)

    bars: list[Any] = []

    def show_progress() -> OnProgress:
        bars.append(tqdm(total=total, disable=args.disable_tqdm, unit="request"))
        return lambda answered: bars[0].update(answered)

    try:
        parts = run_parts(args.procs, part, show_progress)
    finally:
        for bar in bars:
            bar.close()
    return sorted((record for records in parts for record in records), key=lambda record: record.began_s)


def _write(args: argparse.Namespace, result: dict[str, Any], records: Sequence[Record]) -> None:
    if args.output_file is not None:
        line = result | (_details(records) if args.output_details else {})
        with Path(args.output_file).expanduser().open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    if args.plot is None and args.html is None:
        return
    png = draw_png(records, headline(result))
    if args.plot is not None:
        try:
            Path(args.plot).expanduser().write_bytes(png)
        except OSError as error:
            raise SettingsError(f"Cannot write the picture {args.plot}: {error.strerror}.") from None
    if args.html is not None:
        page = html_report(result, shown_settings(args), png)
        Path(args.html).expanduser().write_text(page, encoding="utf-8")


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

    files = locate(path)
    return open_tokenizer(files, ModelSettings())
