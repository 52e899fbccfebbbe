"""Conversations from files: ShareGPT's JSON, and JSON lines of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bough.bench.load import Conversation, Prompt, Turn
from bough.core.errors import SettingsError

Count = Callable[[str], int]
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048  # what SGLang's and vLLM's tools keep of ShareGPT


def sharegpt(path: str, count: Count, output_len: int | None) -> list[Conversation]:
    """The first question of each conversation, to be answered at the length of its answer, or at `output_len`."""
    entries = _parse(_read(path), path)
    if not isinstance(entries, list):
        raise SettingsError(f"{path} is not a ShareGPT file: it must hold a JSON list of conversations.")
    found = []
    for entry in entries:
        said = _said(entry)
        if len(said) < 2:
            continue
        question, answer = count(said[0]), count(said[1])
        length = answer if output_len is None else output_len
        if question < MIN_TOKENS or answer < MIN_TOKENS or question > MAX_PROMPT or question + length > MAX_TOTAL:
            continue
        found.append(Conversation((Turn(said[0], length, question),)))
    return found


def custom(path: str, count: Count, output_len: int) -> list[Conversation]:
    """One request a line: {"prompt": text or token ids}, {"messages": [...]}, or {"conversations": [...]} in ShareGPT's
    form; with `output_len` it says how much is to be answered."""
    found = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if line.strip():
            entry = _parse(line, f"{path}, line {number}")
            found.append(_custom_entry(entry, count, output_len, f"{path}, line {number}"))
    return found


def _custom_entry(entry: Any, count: Count, output_len: int, where: str) -> Conversation:
    fields = entry if isinstance(entry, dict) else {}
    said = _said(fields)
    prompt: Prompt | None = fields.get("prompt") or fields.get("messages") or (said[0] if said else None)
    if not prompt or not isinstance(prompt, str | list):
        raise SettingsError(f"{where}: a request needs prompt (text or token ids), messages or conversations.")
    given = fields.get("output_len")
    if given is None and len(said) > 1 and "prompt" not in fields:
        given = count(said[1])
    length = output_len if given is None else given
    if not isinstance(length, int) or length < 1:
        raise SettingsError(f"{where}: output_len must be a whole number of at least 1, got {length!r}.")
    return Conversation((Turn(prompt, length, _tokens_in(prompt, count)),))


def _tokens_in(prompt: Prompt, count: Count) -> int:
    if isinstance(prompt, str):
        return count(prompt)
    return sum(count(str(part.get("content", ""))) if isinstance(part, dict) else 1 for part in prompt)


def _said(entry: Any) -> list[str]:
    """The texts of a conversation in turn."""
    turns = entry.get("conversations") or entry.get("conversation") or () if isinstance(entry, dict) else ()
    texts = [turn.get("value", turn.get("content")) for turn in turns if isinstance(turn, dict)]
    return [text for text in texts if isinstance(text, str)]


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"Cannot read the data set {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not a data set: it is not UTF-8 text.") from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{where} is not valid JSON: {error}.") from None
