"""The flags of `bough bench serving`, with SGLang's names where it has them, and what they mean for its parts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from bough.bench.backends import BACKENDS
from bough.bench.datasets import DATASETS, DataOptions
from bough.bench.number_checks import flag_of, require_above_zero, require_counts
from bough.core.errors import SettingsError

COUNTS = (
    "num_prompts",
    "procs",
    "random_input_len",
    "random_output_len",
    "gsp_num_groups",
    "gsp_prompts_per_group",
    "gsp_system_prompt_len",
    "gsp_question_len",
    "gsp_output_len",
    "num_turns",
    "max_concurrency",
    "sharegpt_output_len",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    _add_server_flags(parser.add_argument_group("server"))
    _add_data_flags(parser.add_argument_group("data"))
    _add_traffic_flags(parser.add_argument_group("traffic"))
    _add_output_flags(parser.add_argument_group("output"))


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", choices=list(BACKENDS), default="bough", help="what kind of server it is")
    group.add_argument("--base-url", help="of the server; http://HOST:PORT when left out")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=30000)
    group.add_argument("--model", help="name to ask for; the first that the server lists when left out")
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="OPENAI_API_KEY when left out")
    group.add_argument("--extra-request-body", metavar="JSON", default="{}", help="laid over every request's body")
    group.add_argument("--disable-stream", action="store_true", help="ask for whole answers")
    group.add_argument("--disable-ignore-eos", action="store_true", help="let answers end where the model ends them")
    group.add_argument("--tokenizer", metavar="PATH", help="folder or GGUF file, for prompts of exact lengths")


def _add_data_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset-name", choices=list(DATASETS), default="random")
    group.add_argument("--dataset-path", metavar="FILE", help="of sharegpt (JSON) and custom (JSON lines)")
    group.add_argument("--num-prompts", type=int, default=100, help="prompts, or conversations of multi-turn")
    group.add_argument("--random-input-len", type=int, default=256, help="random, and a turn of multi-turn")
    group.add_argument("--random-output-len", type=int, default=64, help="random, multi-turn, custom")
    group.add_argument(
        "--random-range-ratio", type=float, default=1.0, help="lengths are drawn from this share of the full one up"
    )
    group.add_argument("--largest-token", type=int, default=10_000, help="random-ids draws ids up to this one")
    group.add_argument("--sharegpt-output-len", type=int, help="instead of the length of the file's answers")
    group.add_argument("--gsp-num-groups", type=int, default=8, help="groups that share a system prompt")
    group.add_argument("--gsp-prompts-per-group", type=int, default=16)
    group.add_argument("--gsp-system-prompt-len", type=int, default=512, help="also the one of multi-turn")
    group.add_argument("--gsp-question-len", type=int, default=64)
    group.add_argument("--gsp-output-len", type=int, default=64)
    group.add_argument("--num-turns", type=int, default=5, help="turns of each conversation (multi-turn)")
    group.add_argument("--seed", type=int, default=1, help="of prompts, lengths and arrivals")


def _add_traffic_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate", type=float, default=math.inf, help="arrivals per second, Poisson; inf: all at once"
    )
    group.add_argument("--max-concurrency", type=int, help="most conversations at once; others wait for their turn")
    group.add_argument("--procs", type=int, default=1, help="client processes")
    group.add_argument("--warmup-requests", type=int, default=1, help="sent before the clock runs")
    group.add_argument("--flush-cache", action="store_true", help="empty the server's prefix cache before the run")


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-file", metavar="FILE", help="one JSON line per run is added to it")
    group.add_argument("--output-details", action="store_true", help="that line carries every request's times")
    group.add_argument("--tag", help="a word of your own for that line")
    group.add_argument("--plot", metavar="FILE", help="a PNG with the run's distributions (needs matplotlib)")
    group.add_argument("--html", metavar="FILE", help="a report as one HTML page (needs matplotlib)")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def check(args: argparse.Namespace) -> None:
    """What can be wrong is found before anything is sent."""
    require_counts(args, COUNTS)
    require_above_zero(args, ("request_rate",))
    if not 0 <= args.random_range_ratio <= 1:
        raise SettingsError(f"--random-range-ratio must be between 0 and 1, got {args.random_range_ratio:g}.")
    if args.max_concurrency is not None and args.procs > args.max_concurrency:
        raise SettingsError(f"--procs {args.procs} is more than --max-concurrency {args.max_concurrency} allows.")
    for name in ("output_file", "plot", "html"):
        path = getattr(args, name)
        if path is not None and not Path(path).expanduser().resolve().parent.is_dir():
            raise SettingsError(f"{flag_of(name)}: there is no folder {Path(path).parent}.")


def extra_body(args: argparse.Namespace) -> dict[str, Any]:
    try:
        extra = json.loads(args.extra_request_body)
    except ValueError as error:
        raise SettingsError(f"--extra-request-body is not valid JSON: {error}.") from None
    if not isinstance(extra, dict):
        raise SettingsError("--extra-request-body must be a JSON object.")
    return extra


def data_options(args: argparse.Namespace) -> DataOptions:
    return DataOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(DataOptions)})


def shown_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What is needed to repeat the run, less what must not be shown."""
    hidden = {"api_key", "output_file", "output_details", "plot", "html", "disable_tqdm"}
    settings = {name: value for name, value in vars(args).items() if name not in hidden}
    settings["request_rate"] = "inf" if args.request_rate == math.inf else args.request_rate
    return settings
