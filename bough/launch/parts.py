"""What more than one process needs at its start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.core.errors import ModelError, SettingsError
from bough.core.files import user_path
from bough.core.seeds import seed_for_requests
from bough.core.setting_checks import by_kind, json_object
from bough.core.settings import MediaSettings, ModelSettings, Settings
from bough.distributed.topology import Topology
from bough.loader.config import check_config, read_sampling_defaults
from bough.loader.locate import ModelFiles

if TYPE_CHECKING:
    from bough.client.handle import EngineClient
    from bough.client.inputs import InputReader
    from bough.core.model_config import ModelConfig
    from bough.tokenizer.tokenizer import Tokenizer


def open_tokenizer(files: ModelFiles, settings: ModelSettings) -> Tokenizer | None:
    """The model's tokenizer, or the one the user named; None when there is to be none."""
    if not has_text(settings):
        return None
    from bough.tokenizer.load import load_tokenizer

    path = files.tokenizer or files.gguf or files.folder
    if settings.tokenizer_path is not None:
        path = user_path(settings.tokenizer_path)
    metadata = _gguf_metadata(path) if path.suffix.lower() == ".gguf" and not path.is_dir() else None
    return load_tokenizer(
        path, chat_template=settings.chat_template, metadata=metadata, trust_remote_code=settings.trust_remote_code
    )


def has_text(settings: ModelSettings) -> bool:
    """Whether token ids have a text that a grammar could speak of."""
    made_up = settings.model_shape is not None and settings.tokenizer_path is None
    return not settings.skip_tokenizer_init and not made_up


def input_reader(files: ModelFiles, settings: ModelSettings, tokenizer: Tokenizer | None) -> InputReader:
    from bough.client.inputs import InputReader  # only where requests come in

    defaults = read_sampling_defaults(files) if settings.sampling_defaults == "model" else {}
    seed = seed_for_requests(settings.random_seed, settings.enable_deterministic_inference)
    return InputReader(tokenizer, defaults, seed)


def check_media(settings: MediaSettings) -> None:
    by_kind(settings.limit_mm_data_per_request, "limit-mm-data-per-request", int)
    by_kind(settings.mm_process_config, "mm-process-config", dict)


def attach_media(
    client: EngineClient, files: ModelFiles, settings: Settings, tokenizer: Tokenizer | None
) -> Callable[[], None]:
    """From here on prompts may have media, if the model takes them. Returns what ends that."""
    given = None if files.config is None or files.tokenizer is None else json.loads(files.config.read_text())
    if not settings.media.enable_multimodal or given is None or tokenizer is None:
        return lambda: None
    from bough.multimodal.preparer import KINDS, MediaPreparer

    path, family = user_path(settings.model.tokenizer_path or str(files.folder)), given.get("model_type")
    if family not in KINDS:
        return lambda: None
    client.preparer = MediaPreparer(family, files.folder, path, tokenizer, settings.media, client.meter)
    client.media_kinds = frozenset(KINDS[family])
    client.preparer.warm()
    return client.preparer.close


def end_ids(files: ModelFiles, config: ModelConfig, settings: ModelSettings) -> tuple[int, ...]:
    """Every id that ends a text. A folder without generation_config.json may name its chat end token only in the
    tokenizer's files, so those are asked too."""
    if files.gguf is not None or files.generation_config is not None or files.tokenizer is None:
        return config.eos_token_ids
    tokenizer = open_tokenizer(files, settings)
    return tuple(sorted({*config.eos_token_ids, *(() if tokenizer is None else tokenizer.eos_ids)}))


def _gguf_metadata(path: Path) -> dict[str, Any]:
    from bough.loader.gguf_file import GgufArray, GgufFile

    found = {key: value for key, value in GgufFile.open(path).metadata.items() if key.startswith("tokenizer.")}
    return {key: value.values() if isinstance(value, GgufArray) else value for key, value in found.items()}


def adapter_paths(given: str | None) -> list[tuple[str, str, bool]]:
    """What --lora-paths names, in words or in a list as JSON: the name, the path and whether it is pinned."""
    found: list[tuple[str, str, bool]] = []
    try:
        words = json.loads(given) if given and given.lstrip()[0] == "[" else [given] if given else []
        for word in words:
            each = json.loads(word) if isinstance(word, str) and word.startswith("{") else word
            if isinstance(each, str):
                # Folders may have the sign, too: lr=1e-4.
                name, _, path = each.partition("=") if "=" in each and each[0] not in "/.~" else ("", "", each)
                each = {"lora_name": name, "lora_path": path}
            path = str(each["lora_path"])
            found.append((str(each.get("lora_name") or path), path, bool(each.get("pinned"))))
    except (ValueError, TypeError, AttributeError, KeyError):
        shape = "NAME=PATH, PATH or JSON objects with lora_name and lora_path"
        raise SettingsError(f"--lora-paths: {given!r} is not {shape}.") from None
    return found


def check_adapters(settings: Settings) -> None:
    """Raises before a process is started if adapters cannot be had."""
    given, resolver, parallel = adapter_paths(settings.lora.lora_paths), settings.lora.lora_resolver, settings.parallel
    if (given or resolver) and not settings.lora.enable_lora:
        raise SettingsError(f"--lora-{'paths' if given else 'resolver'} needs --enable-lora; add it.")
    if resolver and not user_path(resolver).is_dir():
        raise SettingsError(f"--lora-resolver: {resolver} is no folder; make it, or name another.")
    alone = parallel.simulate_tp * parallel.groups == 1 and not settings.speculative.has_model
    if settings.lora.enable_lora and not alone:
        others = "--enable-dp-attention, draft models and --simulate-tp"
        raise SettingsError(f"--enable-lora: all ranks that compute a token must know its adapter; leave out {others}.")


def check_ranks(files: ModelFiles, settings: Settings) -> None:
    """Raises before a process is started if the model's layers or heads cannot be shared so; ranks find the rest."""
    parallel = settings.parallel
    config = None if parallel.replica_ranks == 1 else _stated_config(files, settings.model)
    if config is None:
        return
    Topology(pp_size=parallel.pp_size).layers_of(config)
    if config.num_heads % (parallel.tp_size // parallel.groups):
        from bough.executor.load_model import check_split  # needs torch, to name the sizes that fit

        check_split(config, parallel.tp_size, parallel.ep_size, groups=parallel.groups)


def _stated_config(files: ModelFiles, settings: ModelSettings) -> ModelConfig | None:
    overrides = json_object(settings.json_model_override_args, "json-model-override-args")
    return check_config(files, overrides, settings.model_impl, embeds=settings.is_embedding)


def check_model(files: ModelFiles, settings: ModelSettings) -> None:
    """Raises if the configuration cannot be used, the architecture is unknown, or a file of weights is damaged. Takes
    milliseconds and no torch; the scheduler process finds the same, but only after seconds."""
    _stated_config(files, settings)
    if settings.load_format not in ("auto", "safetensors", "mistral"):
        return
    from safetensors import SafetensorError, safe_open

    for path in files.safetensors:
        try:
            with safe_open(str(path), framework="numpy"):  # reads the list of tensors
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged or cut short ({error}); fetch it again.") from None
