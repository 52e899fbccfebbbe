"""`bough chat`: a conversation in the terminal. Owns the messages so far; each turn sends all of them.

The engine recognises the beginning of the conversation by itself, so the whole history costs no more than its last
turn; the line after each answer shows how much was taken from the cache. With input from a pipe each line is a message.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bough.cli import generate
from bough.cli.commands import Parser, did_you_mean
from bough.cli.flags import add_engine_flags, given_settings
from bough.cli.generate import DEFAULTS, Message, Output
from bough.cli.sampling_flags import add_sampling_flags, given_sampling
from bough.core.errors import RequestError, SettingsError
from bough.core.files import user_path

if TYPE_CHECKING:
    from rich.console import Console

    from bough.launch.engine import Engine

SAMPLING = {"max_new_tokens": 1024}  # an answer is as long as the model makes it; this ends one that never would
COMMANDS = {
    "/reset": "forget the conversation",
    "/image PATH": "attach a picture, by its file or URL, to the next message",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/help": "show this list",
    "/quit": "leave (Ctrl-D does too)",
}


def run(argv: Sequence[str]) -> int:
    about = "Talks to a model. Ctrl-C stops an answer, Ctrl-D leaves."
    parser = Parser(program="bough chat", about=about, takes_text=True)
    parser.add_argument("--system", metavar="TEXT", help="the system message to begin with")
    add_sampling_flags(parser, SAMPLING, leave_out=frozenset({"n"}))
    add_engine_flags(parser, DEFAULTS)
    parsed = parser.parse(argv)
    settings = given_settings(parsed)
    sampling = given_sampling(parsed, SAMPLING)
    with generate.running(settings) as engine:
        chat = Chat(engine, sampling, parsed.system)
        chat.greet()
        for line in _typed_lines():
            if not chat.take(line.strip()):
                break
    return 0


def describe(output: Output, first_after_s: float, spent_s: float) -> str:
    """The line below an answer; `spent_s` is the time from its first token to its last."""
    meta = output["meta_info"]
    tokens = int(meta["completion_tokens"])
    rate = [f"{(tokens - 1) / spent_s:.1f} tokens/s"] if tokens > 1 and spent_s > 0 else []
    parts = [
        f"{tokens} token{'' if tokens == 1 else 's'}",
        *rate,
        f"first after {first_after_s:.2f} s",
        f"{meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens cached",
    ]
    if "spec_accept_length" in meta:
        parts.append(f"{meta['spec_accept_length']:.2f} tokens a step")
    return " · ".join(parts)


class Chat:
    """One conversation with one engine. Only turns that were answered, if only in part, stay in the history."""

    def __init__(self, engine: Engine, sampling: dict[str, Any], system: str | None) -> None:
        self._engine = engine
        self._tokenizer = generate.chat_tokenizer(engine)
        self._sampling = sampling
        self._system = system
        self._turns: list[Message] = []
        self._images: list[str | bytes] = []  # of the conversation, in its order
        self._attached: list[str | bytes] = []  # to the next message
        self._console = _console()

    @property
    def messages(self) -> list[Message]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return system + self._turns

    def greet(self) -> None:
        if self._console.is_terminal:
            self._say(f"{self._engine.served_model_name}. /help lists the commands.")

    def take(self, line: str) -> bool:
        """Answers a message or obeys a command; False when the user wants to leave."""
        if line.startswith("/"):
            return self._obey(line)
        if line:
            self._answer(line)
        return True

    def _obey(self, line: str) -> bool:
        command, _, text = line.partition(" ")
        match command:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self._turns, self._images, self._attached = [], [], []
                self._say("The conversation was forgotten.")
            case "/system":
                self._system = text.strip() or None
                self._say("The system message was " + ("removed." if self._system is None else "set."))
            case "/image":
                self._attach(text.strip())
            case "/help":
                for name, meaning in COMMANDS.items():
                    self._say(f"{name:<14}{meaning}")
            case _:
                known = [name.split()[0] for name in COMMANDS]
                self._say(f"Unknown command {command}.{did_you_mean(command, known) or ' /help lists them all.'}")
        return True

    def _attach(self, place: str) -> None:
        try:
            self._attached.append(place if "://" in place else user_path(place).read_bytes())
            self._say(f"The next message has {len(self._attached)} picture{'s' * (len(self._attached) > 1)}.")
        except OSError as error:
            self._say(f"{place or '/image'}: {error.strerror}. Give the file or the URL of a picture.")

    def _answer(self, question: str) -> None:
        """Streams one answer. Ctrl-C ends it early, a refusal shows its reason; the engine goes on either way."""
        attached, self._attached = self._attached, []
        parts = [*({"type": "image"} for _ in attached), {"type": "text", "text": question}]
        messages = [*self.messages, {"role": "user", "content": parts if attached else question}]
        images = [*self._images, *attached]
        began_s = time.perf_counter()
        first_s: float | None = None
        output: Output | None = None
        note: str | None = None
        try:
            ids = generate.encode_chat(self._tokenizer, messages)
            media = {"image_data": images} if images else {}
            pieces = generate.stream_pieces(self._engine, input_ids=ids, sampling_params=self._sampling, **media)
            with contextlib.closing(pieces):
                for text, latest in pieces:
                    output, first_s = latest, first_s or time.perf_counter()
                    print(text, end="", flush=True)
            note = generate.abort_reason(output) if output is not None else None
        except KeyboardInterrupt:
            note = "Stopped."
        except RequestError as error:
            note = self._refusal(error)
        if output is not None:
            print()
            self._turns += [messages[-1], {"role": "assistant", "content": output["text"]}]
            self._images = images
        if note is not None:
            self._say(note)
        if output is not None and first_s is not None:
            self._say(describe(output, first_s - began_s, time.perf_counter() - first_s))

    def _refusal(self, error: RequestError) -> str:
        # The ids are the template's own, so nothing can be wrong with them but their number.
        too_long = error.field == "input_ids"
        return f"{error} /reset forgets the conversation so far." if too_long and self._turns else str(error)

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", soft_wrap=True)


def _console() -> Console:
    from rich.console import Console

    # Styles on a terminal only, whatever the environment says: a pipe gets plain text.
    return Console(force_terminal=sys.stdout.isatty(), highlight=False, markup=False, emoji=False)


def _typed_lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        try:
            yield from sys.stdin
        except UnicodeDecodeError:
            raise SettingsError("Standard input is not UTF-8 text.") from None
        return
    with contextlib.suppress(ImportError):  # some Pythons are built without it
        import readline  # noqa: F401  # importing it gives input() its history and editing keys
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        yield line
