"""Finds a model's tokenizer among its files and puts it together.

A Hugging Face folder has a `tokenizer.json`, or a vocabulary in another form (`vocabulary_files`), and small JSON files
beside it. `transformers` is imported only for older forms and to run a folder's own code. A GGUF file has everything in
its metadata.
"""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from bough.core.errors import ModelError, damage_named
from bough.tokenizer import gguf_tokenizer
from bough.tokenizer.chat_template import KINDS, ChatTemplate, MistralTemplate, given_template
from bough.tokenizer.gguf_tokenizer import SplitRule, find_split_rule
from bough.tokenizer.tokenizer import PythonBackend, Tokenizer
from bough.tokenizer.vocabulary_files import Read, read_model, read_tekken

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LLAMA3 = find_split_rule("llama3")
OWN_FILES = ("tokenizer.json", "tekken.json", "tiktoken.model", "tokenizer.model", "spiece.model")
SLOW_FILES = ("vocab.json", "vocab.txt")


def load_tokenizer(
    folder_or_gguf: Path,
    *,
    chat_template: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, or of a GGUF file with this `metadata`. `chat_template`, a file or the
    template itself, replaces the model's own. `trust_remote_code`: code of the folder may be run to read its files,
    which happens only where no reader here knows them."""
    with damage_named(folder_or_gguf):
        if metadata is not None:
            return _from_gguf(metadata, chat_template)
        folder = folder_or_gguf
        config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        if (read := _read_own(folder, config)) is not None:
            return _from_folder(folder, *read, chat_template)
        brings_code = _code_of(config) is not None
        if brings_code and not trust_remote_code:
            raise ModelError(
                f"Only code that {folder} brings along reads its tokenizer ({_code_of(config)}). If you trust its "
                "authors, run it with --trust-remote-code; otherwise add a tokenizer.json."
            )
        if brings_code or any((folder / name).is_file() for name in SLOW_FILES):
            return _through_transformers(folder, config, chat_template, brings_code)
        raise ModelError(
            f"{folder} has no tokenizer: tokenizer.json, tokenizer.model, tiktoken.model or tekken.json is needed."
        )


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


def _read_own(folder: Path, config: dict[str, Any]) -> Read | None:
    """The tokenizer without its surroundings, from the first file that a reader here knows."""
    for name in OWN_FILES:
        file = folder / name
        rule = _split_rule(folder, config) if name == "tiktoken.model" else LLAMA3
        if rule is None or not file.is_file():
            continue
        try:
            match name:
                case "tokenizer.json":
                    backend = tokenizers.Tokenizer.from_file(str(file))
                    backend.no_truncation()  # what a model was trained with; texts here are taken whole, and alone
                    backend.no_padding()
                    backend.encode("")  # which panics where the template names a token that it does not define
                    return backend, config
                case "tekken.json":
                    return read_tekken(file, config)
                case _:
                    return read_model(file, config, rule)
        except ModelError:
            raise
        except Exception as error:  # noqa: BLE001  (the library raises no narrower class)
            raise ModelError(f"{file} is damaged or of an unknown form ({error!r}); fetch it again.") from None
    return None


def _split_rule(folder: Path, config: Mapping[str, Any]) -> SplitRule | None:
    """How the words of a `tiktoken.model` are split. Code beside it may split them in any way, so it is not guessed."""
    model_type = str(_read_json(folder / "config.json").get("model_type"))
    if config.get("tokenizer_class") == "TikTokenTokenizer" or model_type.startswith("kimi"):
        return find_split_rule("kimi-k2")
    return LLAMA3 if _code_of(config) is None else None


def _code_of(config: Mapping[str, Any]) -> str | None:
    """The class, in a Python file of the folder, that is to read the tokenizer."""
    named = config.get("auto_map")
    classes = named.get("AutoTokenizer") if isinstance(named, Mapping) else named
    return next((name for name in reversed(classes) if name), None) if isinstance(classes, list) else classes


def _from_folder(
    folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any], chat_template: str | None
) -> Tokenizer:
    special = _special_tokens(config)
    _add_missing_tokens(backend, folder, config)
    known = [token for token in special.values() if backend.token_to_id(token) is not None]
    backend.add_special_tokens(known)
    if config.get("add_bos_token") is True and special.get("bos_token") in known:
        _ensure_bos(backend, special["bos_token"])
    places = _placeholders(_read_json(folder / "config.json"), backend)
    template = _make_template(chat_template, _folder_templates(folder, config), special, places)
    tekken = folder / "tekken.json"
    if template is None and tekken.is_file() and find_spec("mistral_common") is not None:
        template = MistralTemplate(tekken)
    return _finish(backend, special, template)


def _through_transformers(
    folder: Path, config: Mapping[str, Any], chat_template: str | None, run_code: bool
) -> Tokenizer:
    from transformers import AutoTokenizer, PreTrainedConfig

    for name in ("vocab", "merges"):  # the library would open a text as a file, wherever it is
        if isinstance(config.get(name), str):
            raise ModelError(
                f"{folder / 'tokenizer_config.json'} names a file as its {name}; take it out: the folder's own files "
                "are read."
            )
    # An empty configuration: the library would run the code of the folder's own.
    options = {"trust_remote_code": True, "config": PreTrainedConfig()} if run_code else {"trust_remote_code": False}
    try:
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
    except Exception as error:  # what the folder holds may upset the library anywhere
        raise ModelError(
            f"{folder} has no tokenizer.json, and its other tokenizer files cannot be read: {error}"
        ) from error
    backend = getattr(theirs, "backend_tokenizer", None) or PythonBackend(theirs)
    special = _special_tokens(theirs.special_tokens_map)
    return _finish(backend, special, _make_template(chat_template, _named_templates(theirs.chat_template), special))


def _finish(
    backend: tokenizers.Tokenizer | PythonBackend, special: Mapping[str, str], template: ChatTemplate | None
) -> Tokenizer:
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
                f"{folder}: the added token {entry['content']!r} should have id {token}, but the vocabulary leaves no "
                "room for it there; the folder's tokenizer files do not belong together."
            )


def _ensure_bos(backend: tokenizers.Tokenizer, bos: str) -> None:
    """Some folders ask for BOS in tokenizer_config.json while their tokenizer.json does not add it."""
    if backend.encode("").ids[:1] == [backend.token_to_id(bos)]:
        return
    adds_bos = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, backend.token_to_id(bos))])
    earlier = backend.post_processor
    backend.post_processor = adds_bos if earlier is None else processors.Sequence([earlier, adds_bos])


def _make_template(
    given: str | None, own: Mapping[str, str], variables: Mapping[str, str], places: Mapping[str, str] | None = None
) -> ChatTemplate | None:
    if given is not None:
        return ChatTemplate(given_template(given), variables, places)
    return ChatTemplate(own, variables, places) if own else None


def _placeholders(config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> dict[str, str]:
    """By kind of media, the text that the model's processor replaces."""

    def spelt(name: str) -> str | None:
        ids = (config.get(f"{name}_token_{suffix}") for suffix in ("id", "index"))
        return next((backend.id_to_token(token) for token in ids if isinstance(token, int)), None)

    found = {kind: spelt(kind) for kind in KINDS}
    if config.get("model_type") == "gemma3":
        found["image"] = spelt("boi")  # where an image begins

    def around(kind: str) -> list[str]:
        if kind == "audio":  # which Qwen2-Audio's configuration does not name
            return [
                mark if backend.token_to_id(mark) is not None else "" for mark in ("<|audio_bos|>", "<|audio_eos|>")
            ]
        return [spelt(f"{kind}_{end}") or spelt(f"vision_{end}") or "" for end in ("start", "end")]

    return {kind: token.join(around(kind)) for kind, token in found.items() if token is not None}


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    templates = _named_templates(config.get("chat_template"))
    for name in ("processor_config.json", "chat_template.json"):  # of models that take more than text
        templates |= _named_templates(_read_json(folder / name).get("chat_template"))
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
