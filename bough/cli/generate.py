"""`bough generate`: one prompt in, its completion on standard output as it comes. Keeps no state. And the few steps
that `bough chat` shares."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bough.cli.commands import Parser
from bough.cli.flags import add_engine_flags, given_settings
from bough.cli.sampling_flags import add_sampling_flags, given_sampling
from bough.core.errors import ModelError, RequestError, SettingsError

if TYPE_CHECKING:
    from bough.launch.engine import Engine
    from bough.tokenizer.tokenizer import Tokenizer

Output = dict[str, Any]
Message = dict[str, Any]

# Standard error is the same terminal on which the text appears: only what the user must know goes there.
DEFAULTS = {"log_level": "warning"}


@contextlib.contextmanager
def running(settings: dict[str, Any]) -> Iterator[Engine]:
    """An engine for as long as the block lasts. One that could not show text is refused before it is started."""
    if settings.get("skip_tokenizer_init"):
        raise SettingsError("This command shows text, so --skip-tokenizer-init cannot be used with it.")
    from bough.launch.engine import Engine

    with Engine(**DEFAULTS | settings) as engine:
        yield engine


def chat_tokenizer(engine: Engine) -> Tokenizer:
    tokenizer = engine.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        advice = "give one with --chat-template (a Jinja file or text), or use `bough generate` for plain completion"
        raise ModelError(f"{engine.served_model_name} has no chat template; {advice}.")
    return tokenizer


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def stream_pieces(engine: Engine, **inputs: Any) -> Generator[tuple[str, Output], None, None]:
    """(new text, whole output so far) as tokens come; closing it aborts the request."""
    shown = 0
    with contextlib.closing(engine.generate(**inputs, stream=True)) as outputs:
        for output in outputs:
            yield output["text"][shown:], output
            shown = len(output["text"])


def abort_reason(output: Output) -> str | None:
    """Why the engine gave up on a request after it had begun; None for an ordinary end."""
    finish = output["meta_info"]["finish_reason"] or {}
    return str(finish["message"]) if finish.get("type") == "abort" else None


def run(argv: Sequence[str]) -> int:
    """Starts an engine for one prompt. Everything the user typed is checked before that."""
    parsed = _parser().parse(argv)
    settings = given_settings(parsed)
    sampling = given_sampling(parsed)
    if parsed.raw:
        sampling |= {"skip_special_tokens": False, "no_stop_trim": True}
    prompt = _read_prompt(parsed.prompt)
    with running(settings) as engine:
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
    parser.add_flags()
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
    return {"input_ids": encode_chat(chat_tokenizer(engine), [{"role": "user", "content": prompt}])}


def _print_stream(engine: Engine, inputs: dict[str, Any], *, raw: bool) -> None:
    output: Output | None = None
    with contextlib.closing(stream_pieces(engine, **inputs)) as pieces:
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
        reason = abort_reason(output)
        if reason is not None:
            raise RequestError(reason)
