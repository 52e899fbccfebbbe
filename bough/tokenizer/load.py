"""Finds a model's tokenizer among its files and puts it together.

A Hugging Face folder has a `tokenizer.json` and small JSON files beside it. An older one has only a `tokenizer.model`:
`transformers` converts that, and is imported for it alone. A GGUF file has everything in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from bough.core.errors import ModelError
from bough.tokenizer import gguf_tokenizer
from bough.tokenizer.chat_template import ChatTemplate, given_template
from bough.tokenizer.tokenizer import Tokenizer

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(
    folder_or_gguf: Path, *, chat_template: str | None = None, metadata: Mapping[str, Any] | None = None
) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, or of a GGUF file with this `metadata`. `chat_template`, a file or the
    template itself, replaces the model's own."""
    if metadata is not None:
        return _from_gguf(metadata, chat_template)
    if (folder_or_gguf / "tokenizer.json").is_file():
        return _from_folder(folder_or_gguf, chat_template)
    if any((folder_or_gguf / name).is_file() for name in SLOW_FILES):
        return _through_transformers(folder_or_gguf, chat_template)
    raise ModelError(f"{folder_or_gguf} has no tokenizer: tokenizer.json or tokenizer.model is needed.")


def _from_gguf(metadata: Mapping[str, Any], chat_template: str | None) -> Tokenizer:
    backend = gguf_tokenizer.build_backend(metadata)
    special = gguf_tokenizer.special_token_ids(metadata)
    return Tokenizer(
        backend,
        bos_id=special.get("bos_token"),
        eos_ids=gguf_tokenizer.end_ids(metadata),
        chat_template=_make_template(
            chat_template,
            gguf_tokenizer.chat_templates(metadata),
            {name: metadata["tokenizer.ggml.tokens"][token] for name, token in special.items()},
        ),
    )


def _from_folder(folder: Path, chat_template: str | None) -> Tokenizer:
    file = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  (the library raises no narrower class)
        raise ModelError(f"{file} is damaged or of an unknown form ({error}); fetch it again.") from None
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    _add_missing_tokens(backend, folder, config)
    known = [token for token in special.values() if backend.token_to_id(token) is not None]
    backend.add_special_tokens(known)
    if config.get("add_bos_token") is True and special.get("bos_token") in known:
        _ensure_bos(backend, special["bos_token"])
    return _finish(backend, special, _make_template(chat_template, _folder_templates(folder, config), special))


def _through_transformers(folder: Path, chat_template: str | None) -> Tokenizer:
    from transformers import AutoTokenizer

    config = folder / "tokenizer_config.json"
    for name in ("vocab", "merges"):  # the library would open a text as a file, wherever it is
        if isinstance(_read_json(config).get(name), str):
            raise ModelError(f"{config} names a file as its {name}; take it out: the folder's own files are read.")
    try:
        # False: left to itself, the library asks standard input whether to run code that the folder brings along.
        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what the folder holds may upset the library anywhere
        asks = "trust_remote_code" in str(error)
        reason = "they bring code of their own, which is not run; add a tokenizer.json." if asks else error
        raise ModelError(
            f"{folder} has no tokenizer.json, and its older tokenizer files cannot be converted: {reason} "
            "(A tokenizer.model needs `pip install sentencepiece protobuf`.)"
        ) from error
    backend = getattr(slow, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"The tokenizer in {folder} has no fast form; add a tokenizer.json to the folder.")
    special = _special_tokens(slow.special_tokens_map)
    templates = _named_templates(slow.chat_template)
    return _finish(backend, special, _make_template(chat_template, templates, special))


def _finish(backend: tokenizers.Tokenizer, special: Mapping[str, str], template: ChatTemplate | None) -> Tokenizer:
    bos_id, eos_id = (
        backend.token_to_id(special[name]) if name in special else None for name in ("bos_token", "eos_token")
    )
    return Tokenizer(backend, bos_id=bos_id, eos_ids=() if eos_id is None else (eos_id,), chat_template=template)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name to spelling. A token is written as its text, or as an object that describes how it matches."""
    named = {name: config.get(name) for name in SPECIAL_NAMES}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        named |= extra
    spelt = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in named.items()}
    return {name: value for name, value in spelt.items() if isinstance(value, str) and value}


def _add_missing_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Adds the tokens that only the files beside `tokenizer.json` know, under the ids they say."""
    described = {int(token): entry for token, entry in config.get("added_tokens_decoder", {}).items()}
    for content, token in _read_json(folder / "added_tokens.json").items():
        described.setdefault(int(token), {"content": content})
    for token, entry in sorted(described.items()):
        if backend.id_to_token(token) is not None:
            continue
        fields = {name: entry[name] for name in ("lstrip", "rstrip", "normalized", "single_word") if name in entry}
        backend.add_tokens([AddedToken(entry["content"], special=entry.get("special", False), **fields)])
        if backend.token_to_id(entry["content"]) != token:
            raise ModelError(
                f"{folder}: the added token {entry['content']!r} should have id {token}, but tokenizer.json leaves no "
                "room for it there; the folder's tokenizer files do not belong together."
            )


def _ensure_bos(backend: tokenizers.Tokenizer, bos: str) -> None:
    """Some folders ask for BOS in tokenizer_config.json while their tokenizer.json does not add it."""
    if backend.encode("").ids[:1] == [backend.token_to_id(bos)]:
        return
    adds_bos = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, backend.token_to_id(bos))])
    earlier = backend.post_processor
    backend.post_processor = adds_bos if earlier is None else processors.Sequence([earlier, adds_bos])


def _make_template(given: str | None, own: Mapping[str, str], variables: Mapping[str, str]) -> ChatTemplate | None:
    if given is not None:
        return ChatTemplate(given_template(given), variables)
    return ChatTemplate(own, variables) if own else None


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    templates = _named_templates(config.get("chat_template"))
    templates |= _named_templates(_read_json(folder / "chat_template.json").get("chat_template"))
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates


def _named_templates(value: Any) -> dict[str, str]:
    match value:
        case str():
            return {"default": value}
        case list():
            return {entry["name"]: entry["template"] for entry in value}
        case dict():
            return dict(value)
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    return value if isinstance(value, dict) else {}
