"""`bough generate`: one prompt in, its completion on standard output as it comes. Keeps no state."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bough.cli import engines
from bough.cli.commands import Parser
from bough.cli.engines import DEFAULTS, Output
from bough.cli.flags import add_engine_flags, given_settings
from bough.cli.sampling_flags import add_sampling_flags, given_sampling
from bough.core.errors import RequestError, SettingsError

if TYPE_CHECKING:
    from bough.launch.engine import Engine


def run(argv: Sequence[str]) -> int:
    """Starts an engine for one prompt. Everything the user typed is checked before that."""
    parsed = _parser().parse(argv)
    settings = given_settings(parsed)
    sampling = given_sampling(parsed)
    if parsed.raw:
        sampling |= {"skip_special_tokens": False, "no_stop_trim": True}
    prompt = _read_prompt(parsed.prompt)
    with engines.running(settings) as engine:
        inputs = _inputs(engine, prompt, parsed.chat) | {"sampling_params": sampling}
        if parsed.json or parsed.no_stream or sampling.get("n", 1) > 1:
            _print_whole(engine.generate(**inputs), as_json=parsed.json, raw=parsed.raw)
        else:
            _print_stream(engine, inputs, raw=parsed.raw)
    return 0


def _parser() -> Parser:
    about = "Completes a prompt and prints the text as it comes."
    parser = Parser(program="bough generate", usage="PROMPT", about=about, takes_text=True)
    # Optional for argparse, so that a misspelt flag is reported before a missing prompt.
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue; - reads standard input")
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a chat message, in the model's template"
    )
    parser.add_argument("--json", action="store_true", help="print the whole output object instead of its text")
    parser.add_argument("--no-stream", action="store_true", help="print the text when it is complete")
    about_raw = "print exactly what was generated: special tokens and the stop text too, and no newline at the end"
    parser.add_argument("--raw", action="store_true", help=about_raw)
    add_sampling_flags(parser)
    add_engine_flags(parser, DEFAULTS)
    return parser


def _read_prompt(given: str | None) -> str:
    if given is None:
        raise SettingsError('Give a prompt: `bough generate "The capital of France is"`, or - to read standard input.')
    if given != "-":
        prompt = given
    else:
        try:
            # The newline with which echo and editors end their text is not meant for the model.
            prompt = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError:
            raise SettingsError("Standard input is not UTF-8 text.") from None
    if not prompt:
        raise SettingsError("The prompt is empty; give at least one word.")
    return prompt


def _inputs(engine: Engine, prompt: str, chat: bool) -> dict[str, Any]:
    if not chat:
        return {"prompt": prompt}
    return {"input_ids": engines.encode_chat(engines.chat_tokenizer(engine), [{"role": "user", "content": prompt}])}


def _print_stream(engine: Engine, inputs: dict[str, Any], *, raw: bool) -> None:
    output: Output | None = None
    with contextlib.closing(engines.stream_pieces(engine, **inputs)) as pieces:
        for text, latest in pieces:
            output = latest
            print(text, end="", flush=True)
    assert output is not None  # a stream that gives nothing has raised
    _end_line(output["text"], raw)
    _raise_if_aborted([output])


def _print_whole(result: Output | list[Output], *, as_json: bool, raw: bool) -> None:
    outputs = result if isinstance(result, list) else [result]
    if as_json:
        print(json.dumps(result, ensure_ascii=False, indent=2))
    else:
        for number, output in enumerate(outputs, start=1):
            if len(outputs) > 1:
                print(f"--- {number} of {len(outputs)}")
            print(output["text"], end="")
            _end_line(output["text"], raw and len(outputs) == 1)
    _raise_if_aborted(outputs)


def _end_line(text: str, raw: bool) -> None:
    if not raw and not text.endswith("\n"):
        print()


def _raise_if_aborted(outputs: Sequence[Output]) -> None:
    """What was generated has been shown; the reason why it is incomplete follows as the command's error."""
    for output in outputs:
        reason = engines.abort_reason(output)
        if reason is not None:
            raise RequestError(reason)
