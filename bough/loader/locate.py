"""What a user's `--model-path` means: a name of the catalogue, a file or folder on disk, or a Hugging Face repository.

Answers with paths only; what is inside the files is read by `config` and `load`. A folder without weights is accepted,
because random weights need only its configuration.
"""

import functools
import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bough.core.errors import ModelError, SettingsError, nearest
from bough.core.files import user_path
from bough.core.settings import ModelSettings
from bough.loader import catalogue
from bough.models.fields import file_in, read_json

GGUF_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # of a split model
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
SHAPES = Path(__file__).parent / "shapes"  # a config.json of each: public models to be served with random weights
INDEX_NAME = "model.safetensors.index.json"
PARAMS_NAME = "params.json"  # the configuration beside Mistral's consolidated.safetensors
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json")
WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
CODE_FILES = ["*.py", "*.tiktoken"]  # of tokenizers, with the vocabularies that only they read
OTHER_LAYOUTS = ["original/*", "onnx/*"]  # the same weights again
UNWANTED_FILES = ["consolidated*", *OTHER_LAYOUTS]  # the first may be the only ones
MISTRAL_UNWANTED = ["model*.safetensors", *OTHER_LAYOUTS]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model. Weights are `gguf`, `safetensors` or `ctranslate2`; a bare configuration has none."""

    name: str  # for display
    folder: Path
    gguf: Path | None = None
    safetensors: tuple[Path, ...] = ()
    config: Path | None = None
    tokenizer: Path | None = None  # a folder with tokenizer files; None: the GGUF carries its own
    generation_config: Path | None = None
    ctranslate2: Path | None = None  # a model.bin: weights and shape


def find_files(settings: ModelSettings) -> ModelFiles:
    """The files of the model that the settings name: a shape, or whatever `--model-path` means."""
    if settings.model_shape is None:
        code, load_format = settings.trust_remote_code, settings.load_format
        return locate(settings.model_path, settings.revision, code=code, load_format=load_format)
    if settings.model_path is not None or settings.load_format not in ("auto", "dummy"):
        raise SettingsError("--model-shape has random weights: leave out --model-path and --load-format.")
    return _in_folder(SHAPES / settings.model_shape, settings.model_shape)


def locate(
    model: str | None,
    revision: str | None = None,
    *,
    progress: bool = True,
    code: bool = False,
    load_format: str = "auto",
) -> ModelFiles:
    """Finds the model, fetching it where needed, its `code` only if asked. `None` is the catalogue's default;
    `revision` concerns hubs only, `load_format` folders that hold the weights in several ways."""
    entry = catalogue.DEFAULT if model is None else catalogue.find(model)
    if entry is not None:
        path = catalogue.pull(entry, progress)
        if entry.source.beside:
            return _in_folder(path.parent, entry.name)
        return ModelFiles(name=entry.name, folder=path.parent, gguf=path)
    assert model is not None
    path = user_path(model)
    if there(path.is_dir):
        return _in_folder(path, path.resolve().name, load_format)
    if there(path.is_file):
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is not a .gguf file; give a .gguf file or the folder that holds the model.")
        return ModelFiles(name=path.stem, folder=path.parent, gguf=path)
    if REPOSITORY.fullmatch(model) and not model.startswith(".") and not model.endswith(".gguf"):
        folder = _download_repository(model, revision, code, mistral=load_format == "mistral")
        return _in_folder(folder, model.split("/")[-1], load_format)
    hint = f" Did you mean {near!r}?" if (near := nearest(model, catalogue.KNOWN)) else ""
    raise ModelError(
        f"Unknown model {model!r}: no such file or folder, no name of the catalogue ({catalogue.NAMES}), and not of "
        f"the form org/name of a Hugging Face repository.{hint}"
    )


def _in_folder(folder: Path, name: str, load_format: str = "auto") -> ModelFiles:
    tokenizer = folder if any((folder / file).is_file() for file in TOKENIZER_FILES) else None
    generation_config = _if_file(folder / "generation_config.json")
    if load_format == "mistral":
        params, weights = _if_file(folder / PARAMS_NAME), tuple(sorted(folder.glob("consolidated*.safetensors")))
        if params is None or not weights:
            text = f"{folder} lacks {PARAMS_NAME} or consolidated.safetensors; leave out --load-format mistral."
            raise ModelError(text)
        return ModelFiles(name, folder, None, weights, params, tokenizer, generation_config)
    safetensors = () if load_format == "gguf" else _safetensors_in(folder)
    config = _if_file(folder / "config.json") or _if_file(folder / PARAMS_NAME)
    found = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith("mmproj"))
    ggufs = [path for path in found if (part := GGUF_PART.search(path.name)) is None or int(part[1]) == 1]
    if ggufs and not safetensors:
        if len(ggufs) > 1:
            names = ", ".join(path.name for path in ggufs)
            raise ModelError(f"{folder} holds {len(ggufs)} GGUF files ({names}); give the path of one of them.")
        return ModelFiles(name, folder, gguf=ggufs[0], tokenizer=tokenizer, generation_config=generation_config)
    binary = _if_file(folder / "model.bin")
    if binary is not None and not safetensors and "model_type" not in read_json(folder / "config.json"):
        return ModelFiles(name, folder, tokenizer=tokenizer, ctranslate2=binary)
    if config is None:
        raise ModelError(f"{folder} holds no model: there is neither a config.json nor a .gguf file in it.")
    return ModelFiles(name, folder, None, safetensors, config, tokenizer, generation_config)


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """The files of a model by their names: those of a split one, if this is the first of them."""
    part = GGUF_PART.search(path.name)
    if part is None or int(part[1]) != 1:
        return (path,)
    stem, count = path.name[: part.start()], int(part[2])
    return tuple(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))


def _safetensors_in(folder: Path) -> tuple[Path, ...]:
    """The files that make up the weights, by the index where there is one: folders may hold the weights twice."""
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} is damaged: it has no weight_map; fetch it again.")
        names = weight_map.values()
        if not all(isinstance(name, str) for name in names):
            raise ModelError(f"{index} is damaged: its weight_map must name files; fetch it again.")
        shards = tuple(file_in(folder, name, index) for name in sorted(set(names)))
        missing = [shard.name for shard in shards if _if_file(shard) is None]
        if missing:
            raise ModelError(
                f"{folder} lacks {len(missing)} of {len(shards)} weight files that its index names "
                f"({missing[0]}{', …' if len(missing) > 1 else ''}); fetch them again."
            )
        return shards
    single = folder / "model.safetensors"
    return (single,) if single.is_file() else tuple(sorted(folder.glob("*.safetensors")))


def _if_file(path: Path) -> Path | None:
    return path if there(path.is_file) else None


def there(check: Callable[[], bool]) -> bool:
    """What a check of a path says, also of a name that no file can have."""
    try:
        return check()
    except OSError:
        return False


def _download_repository(repository: str, revision: str | None, code: bool, *, mistral: bool) -> Path:
    """The local snapshot of a Hugging Face repository; one that is cached already needs no network."""
    from huggingface_hub import errors, snapshot_download  # half a second, and most models are on disk

    wanted = WANTED_FILES + CODE_FILES if code else WANTED_FILES
    # Which HTTP library the hub's package uses depends on its version; its error is no OSError in all of them.
    transport_errors = tuple(getattr(errors, name, OSError) for name in ("HTTPError", "RevisionResolutionError"))
    fetch = functools.partial(snapshot_download, repository, revision=revision, allow_patterns=wanted)
    try:
        folder = Path(fetch(ignore_patterns=MISTRAL_UNWANTED if mistral else UNWANTED_FILES))
        alone = not mistral and (folder / PARAMS_NAME).is_file() and not (folder / "config.json").is_file()
        return Path(fetch(ignore_patterns=OTHER_LAYOUTS)) if alone else folder
    except errors.GatedRepoError:
        reason = "its licence must be accepted on the hub first, and HF_TOKEN must hold a token of that account"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no such repository, or it is private and HF_TOKEN is missing"
    except errors.RevisionNotFoundError:
        reason = f"the repository has no revision {revision!r}"
    except (OSError, ValueError, errors.EntryNotFoundError, *transport_errors) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    raise ModelError(
        f"Could not fetch {repository!r} from the Hugging Face hub: {reason}. It is neither a file or folder here nor "
        f"a name of the catalogue ({catalogue.NAMES})."
    )


def fingerprint(files: ModelFiles) -> str:
    """Of the configuration and of each file of weights: its size, its beginning and a piece of its middle, because
    models of one family differ in the numbers alone."""
    weights = files.safetensors if files.gguf is None else gguf_parts(files.gguf)
    weights = weights if files.ctranslate2 is None else (files.ctranslate2,)
    found = hashlib.sha256()
    for path in (*([files.config] if files.config else []), *weights):
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            for position in (0, size // 2):
                file.seek(position)
                found.update(size.to_bytes(8, "big") + file.read(1 << 16))
    return found.hexdigest()[:16]
