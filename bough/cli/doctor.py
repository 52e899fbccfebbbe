"""`bough doctor`: tells in a page whether Bough will run here, how well, and what to type where it will not.

Exit code 0 when everything needed is there, 1 otherwise. Each question is one function that returns plain data. Torch
is loaded by name inside the functions that need it, because a missing torch is one of the findings.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from bough.cli.commands import Parser
from bough.cli.flags import add_engine_flags, settings_with_model
from bough.core.errors import BoughError, ModelError, ResourceError, SettingsError
from bough.core.files import user_path
from bough.core.model_config import ModelConfig
from bough.core.settings import MODEL_SHAPES, ModelSettings, Settings, all_fields
from bough.distributed.cost_model import Cluster
from bough.executor import sizing
from bough.executor.machine import compute_cores, free_memory_bytes, usable_cores
from bough.executor.sizing import gib
from bough.loader import catalogue
from bough.loader.locate import REPOSITORY, ModelFiles, find_files, locate, there
from bough.native.library import instruction_sets, load_library, use_instruction_set
from bough.version import __version__

if TYPE_CHECKING:
    from bough.executor.splits import Outlook
    from bough.loader.source import DummySource

USUAL_TOKENS = 2048  # prompt and answer of a request
# Flags with which a model or its context fits that does not as it was asked for, the least loss first.
SMALL_CACHE = {"kv_cache_dtype": "fp8_e4m3"}
REMEDIES = {
    "cpu": ({"quantization": "int8"}, {"quantization": "int4"}),
    "cuda": (SMALL_CACHE, *({"quantization": width} | more for width in ("fp8", "int4") for more in ({}, SMALL_CACHE))),
}
SHOWN_SPLITS = 8
TOO_LARGE = "choose a smaller model, free some memory, or add --plan to see on which GPUs it fits"
COMPILERS = ("c++", "g++", "clang++")


class Fit(msgspec.Struct, frozen=True):
    """What there is room for. Numbers are absent when the model is not on disk or does not fit; `note` says why."""

    model: str
    note: str
    context_length: int | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    kv_tokens: int | None = None
    flags: str = ""  # with which it fits; empty: as it was asked for
    attention_backend: str | None = None


class Finding(msgspec.Struct, frozen=True):
    needed: bool
    what: str
    fix: str


Facts = dict[str, Any]


def run(argv: Sequence[str]) -> int:
    about = "Shows what this machine offers, what an engine with the given flags would use, what would fit"
    parser = Parser(program="bough doctor", about=f"{about}, and what is missing.")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="same as --model-path; a config.json is enough")
    parser.add_flags()
    add_engine_flags(parser)
    parsed = parser.parse(argv)
    settings = settings_with_model(parsed)
    if parsed.plan:
        return _plan(settings, parsed.gpus or "8xH200", parsed.json)
    if parsed.gpus is not None:
        raise SettingsError("--gpus is what a plan is for: add --plan; without it, doctor looks at this machine.")
    fit, findings = look_at_fit(settings)
    missing = (*look_for_missing(), *findings)
    ok = not any(finding.needed for finding in missing)
    machine, use = look_at_machine(), look_at_use(settings)
    use["attention_backend"] = fit.attention_backend or use["attention_backend"]
    if parsed.json:
        report = {"ok": ok, "version": __version__, "machine": machine, "use": use, "fit": fit, "missing": missing}
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        print("\n".join(_page(machine, use, fit, missing)))
    return 0 if ok else 1


def _page(machine: Facts, use: Facts, fit: Fit, missing: Sequence[Finding]) -> Iterator[str]:
    yield f"Bough {__version__}"
    yield "\nThis machine"
    yield _line("system", machine["os"])
    yield _line("Python", machine["python"])
    yield _line("CPU", f"{machine['cpu']}, {machine['cores']} of {machine['cores_total']} cores usable")
    yield _line("memory", f"{gib(machine['memory_free_bytes'])} usable of {gib(machine['memory_total_bytes'])}")
    yield _line("disk", f"{gib(machine['disk_free_bytes'])} free at {machine['home']}")
    yield _line("GPU", "; ".join(use["gpus"]) or "torch sees none")
    yield "\nAn engine would use"
    yield _line("device", f"{use['device']}, {use['threads']} threads")
    yield _line("numbers", use["dtype"])
    yield _line("torch", use["torch"] or "not installed")
    yield _line("attention", f"{use['attention_backend']} back end")
    yield _line("CPU set", use["cpu_instruction_set"] or "torch's own: the native kernels are not compiled")
    yield f"\nWhat fits: {fit.model}"
    if fit.weight_bytes is not None:
        yield _line("weights", gib(fit.weight_bytes))
    if fit.kv_tokens is not None and fit.context_length is not None:
        contexts = fit.kv_tokens / fit.context_length
        yield _line("room", f"{fit.kv_tokens:,} tokens, {contexts:.1f} times the context of {fit.context_length:,}")
        usual = min(USUAL_TOKENS, fit.context_length)
        yield _line("batch", f"{fit.kv_tokens // usual:,} requests of {usual:,} tokens at once")
    yield _line("why", fit.note)
    if fit.flags:
        yield _line("flags", fit.flags)
    yield "\nMissing" if missing else "\nNothing is missing."
    for finding in missing:
        yield f"  {'needed:  ' if finding.needed else 'optional:'} {finding.what}"
        yield f"            → {finding.fix}"


def _plan(settings: Settings, gpus: str, as_json: bool) -> int:
    """Prints how the model could be split; weights of 8 bits are tried where it does not fit as it is."""
    from bough.executor.build import check_number_formats
    from bough.executor.load_model import multiplies_fp8, resolve_config
    from bough.executor.splits import outlooks, weight_bytes_of
    from bough.models.registry import runs_transformers

    cluster, asked = Cluster.parse(gpus), settings.model.model_path
    check_number_formats(settings, cluster.gpu.capability)
    files = _files_on_disk(settings, catalogue.DEFAULT if asked is None else catalogue.find(asked))
    if files is None:
        raise ModelError(f"The model is not on disk: give its config.json or folder, or {', '.join(MODEL_SHAPES)}.")
    fp8 = multiplies_fp8(cluster.gpu.capability)
    config, numbers = resolve_config(files, settings), weight_bytes_of(files, settings, fp8=fp8)
    if runs_transformers(config) or config.vectors is not None or config.speech is not None:
        raise SettingsError(f"{files.name} runs on one GPU, so there is no plan to make; --dp-size starts replicas.")
    context = settings.model.context_length or min(USUAL_TOKENS, config.context_length)
    found = outlooks(config, settings, cluster, numbers, context)
    if not found and numbers > 1.0 and fp8:
        numbers, tried = 1.0, outlooks(config, settings, cluster, 1.0, context)
        found = [msgspec.structs.replace(each, flags=f"{each.flags} --quantization fp8".strip()) for each in tried]
    if as_json:
        print(json.dumps({"context": context, "weight_bytes": numbers, "splits": msgspec.to_builtins(found)}, indent=2))
    else:
        head = f"{files.name} on {gpus}: weights of {8 * numbers:.0f} bits, requests of {context:,} tokens"
        print(head, *_splits_table(found, _typed(settings)), sep="\n")
    return 0 if found else 1


def _typed(settings: Settings) -> str:
    """The command with what was given of the model and its memory: the plan is for these."""
    model, usual = settings.model.model_path or settings.model.model_shape, Settings().to_flat()
    words = ["bough serve", *([f"--model-shape {model}" if model in MODEL_SHAPES else model] if model else [])]
    for group, f in all_fields():
        value = getattr(getattr(settings, group), f.name)
        if group not in ("model", "memory", "scheduler") or value == usual[f.name] or value == model:
            continue
        words.append(("--no-" if value is False else "--") + f.name.replace("_", "-"))
        words += [] if isinstance(value, bool) else [quote(str(value))]
    return " ".join(words)


def _splits_table(found: Sequence[Outlook], typed: str) -> Iterator[str]:
    if not found:
        yield "It does not fit, however it is split: take more GPUs, or a shorter --context-length."
        return
    heads = ["tp", "pp", "dp", "ep", "attention groups", "weights, GiB", "KV, GiB", "KV tokens", "prompts, tok/s"]
    quickest = min(found, key=lambda each: each.paces[0].step_ms)
    shown = [*found[:SHOWN_SPLITS], *([quickest] if quickest not in found[:SHOWN_SPLITS] else [])]
    most = [max(pace.requests for pace in paces) for paces in zip(*(each.paces for each in shown), strict=True)]
    heads += [f"{requests:,} at once: ms, tok/s" for requests in most]
    yield f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    for each in shown:
        cells = [*map(str, astuple(each.split)), f"{each.weight_bytes / 2**30:.1f}", f"{each.kv_bytes / 2**30:.1f}"]
        cells += [f"{each.kv_tokens:,}", f"{each.prompt_tokens_per_s:,.0f}"]
        for of, asked in zip(each.paces, most, strict=True):
            cells += [f"{of.step_ms:.2f}, {of.tokens_per_s:,.0f}" + f" ({of.requests:,} fit)" * (of.requests < asked)]
        yield f"| {' | '.join(cells)} |"
    yield f"\n{len(found)} splits fit (--json has all); times are modelled, not measured. To type:"
    for name, best in (("most tokens per second", found[0]), ("quickest for one request", quickest)):
        times = f"  ({best.servers} times, behind `bough gateway`)" if best.servers > 1 else ""
        yield f"  {name + ':':<26}{typed} {best.flags}{times}"


def _line(name: str, value: str) -> str:
    return f"  {name:<10}{value}"


def look_at_machine() -> Facts:
    """Cores and memory count the container's limits."""
    home = catalogue.home()
    existing = next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    return {
        "os": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "cores_total": os.cpu_count() or 1,
        "memory_free_bytes": free_memory_bytes(),
        "memory_total_bytes": int(psutil.virtual_memory().total),
        "home": str(home),
        "disk_free_bytes": shutil.disk_usage(existing).free,
    }


def look_at_use(settings: Settings) -> Facts:
    model, torch = settings.model, load_torch()
    use_instruction_set(model.cpu_instruction_set)
    library = load_library()
    gpus = () if torch is None else map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {
        "device": _device(model, torch),
        "dtype": _dtype_name(settings, torch),
        "threads": model.cpu_threads or compute_cores(),
        "torch": None if torch is None else str(torch.__version__),
        "attention_backend": _attention_backend(settings, torch),
        "cpu_instruction_set": None if library is None else instruction_sets(library)[-1],
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
    }


def look_at_fit(settings: Settings) -> tuple[Fit, list[Finding]]:
    """How many tokens the KV cache would hold; nothing is fetched to find out."""
    asked = settings.model.model_shape or settings.model.model_path
    entry = catalogue.DEFAULT if asked is None else catalogue.find(asked)
    name = entry.name if entry is not None else str(asked)
    files = _files_on_disk(settings, entry)
    if files is None:
        fix = f"bough models pull {name}" if entry is not None else f"hf download {name}"
        missing = Finding(False, f"{name} is not fetched; the first start would do it.", fix)
        return Fit(name, "unknown until the model is fetched"), [missing]
    if (torch := load_torch()) is None:
        return Fit(name, "unknown without torch"), []
    return _measure(name, files, settings, torch)


def look_for_missing() -> list[Finding]:
    absent: dict[str | None, list[str]] = {}  # by the extra that they are for
    for name, extra in _requirements():
        if not _installed(name):
            absent.setdefault(extra, []).append(name)
    needed = absent.pop(None, [])
    found = [Finding(True, f"The package {name} is not installed.", f"pip install {name}") for name in needed]
    if _installed("torch") and load_torch() is None:
        what = "The package torch is installed but cannot be loaded; `python -c 'import torch'` shows why."
        found.append(Finding(True, what, "pip install --force-reinstall torch"))
    for extra, names in absent.items():
        if extra != "dev":
            what = f"The extra {extra!r} is not complete: {', '.join(names)}."
            found.append(Finding(False, what, f"pip install 'bough[{extra}]'"))
    if importlib.util.find_spec("pip") is None:
        found.append(Finding(False, "There is no pip, so models cannot be pulled.", "python -m ensurepip"))
    if load_library() is None:
        what = "The native CPU kernels are not compiled or cannot be opened here, so torch does their work."
        found.append(Finding(False, what, "bough build-kernels"))
    if not any(map(shutil.which, COMPILERS)):
        what = "There is no C++ compiler, so torch cannot compile kernels."
        found.append(Finding(False, what, "apt install g++ (or the like)"))
    return found


def load_torch() -> Any | None:
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError):  # OSError: one of its shared libraries
        return None


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _device(model: ModelSettings, torch: Any | None) -> str:
    sees_gpu = torch is not None and torch.cuda.is_available()
    return "cuda" if sees_gpu and model.device in ("auto", "cuda") else "cpu"


def _dtype_name(settings: Settings, torch: Any | None) -> str:
    if settings.model.dtype != "auto":
        return settings.model.dtype
    return "bfloat16" if _device(settings.model, torch) == "cuda" else "float32"


def _attention_backend(settings: Settings, torch: Any | None, config: ModelConfig | None = None) -> str:
    """That of the model; without one, of those that the native kernels can compute."""
    if settings.model.attention_backend != "auto":
        return settings.model.attention_backend
    if _device(settings.model, torch) == "cuda":
        return "triton"
    if load_library() is None or torch is None or config is None:
        return "torch" if load_library() is None else "native"
    from bough.executor.build import native_obstacle

    dtype = getattr(torch, _dtype_name(settings, torch))
    return "native" if native_obstacle(settings, config, dtype) is None else "torch"


def _files_on_disk(settings: Settings, entry: catalogue.Entry | None) -> ModelFiles | None:
    model = settings.model.model_path
    shape = settings.model.model_shape or model
    if shape in MODEL_SHAPES:
        return find_files(replace(settings.model, model_path=None, model_shape=shape))
    if entry is not None:
        return None if catalogue.local_path(entry) is None else locate(entry.name)
    assert model is not None
    if Path(model).name == "config.json":
        model = str(user_path(model).parent)
    if there(user_path(model).exists) or not REPOSITORY.fullmatch(model):
        return locate(model)  # or its error, which says what would be right
    from huggingface_hub import errors, snapshot_download

    try:
        return locate(snapshot_download(model, revision=settings.model.revision, local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return None
    except errors.HFValidationError:
        return locate(model)  # its error


def _measure(name: str, files: ModelFiles, settings: Settings, torch: Any) -> tuple[Fit, list[Finding]]:
    """What fits with the settings as they are. Where that is not the whole context: what does with the first
    remedy that helps, or else a part of it that is enough for a usual request, with as little change as possible."""
    from bough.executor.load_model import initial_format, resolve_config
    from bough.loader.source import DummySource

    config = resolve_config(files, settings)
    stored = "float32" if initial_format(settings) == "dummy" else config.dtype
    shapes = DummySource(config, getattr(torch, stored))
    fit, error = _try(name, files, settings, config, shapes, torch)
    whole, fitting = config.context_length, {"": fit} if error is None else {}
    if (fit.kv_tokens or 0) < whole:
        for remedy in _remedies(whole, settings, torch):
            changed = Settings.from_flat({**settings.to_flat(), **remedy})
            other, still = _try(name, files, changed, config, shapes, torch)
            if still is None:
                fitting[" ".join(f"--{flag.replace('_', '-')} {value}" for flag, value in remedy.items())] = other
    for enough in (whole, min(whole, USUAL_TOKENS)):
        for flags, other in fitting.items():
            if (tokens := other.kv_tokens or 0) < enough:
                continue
            typed = flags if tokens >= whole else f"{flags} --context-length {tokens}".strip()
            if not typed:
                return other, []
            what = str(error or f"The context of {whole:,} tokens does not fit: there is room for {fit.kv_tokens:,}.")
            note, context = f"only with {typed}: {other.note}", min(tokens, whole)
            told = msgspec.structs.replace(other, note=note, flags=typed, context_length=context)
            return told, [Finding(error is not None, what, f"add {typed}")]
    return fit, [] if error is None else [Finding(True, str(error), TOO_LARGE)]


def _remedies(context: int, settings: Settings, torch: Any) -> list[dict[str, Any]]:
    """What could be changed about the settings: first more memory, then what costs precision."""
    if _device(settings.model, torch) == "cuda":
        return [*({"tp_size": size} for size in (2, 4, 8) if size <= torch.cuda.device_count()), *REMEDIES["cuda"]]
    page = settings.memory.page_size  # an engine takes less than all memory by itself
    return [{"max_total_tokens": -(-context // page) * page}, *REMEDIES["cpu"]]


def _try(
    name: str, files: ModelFiles, settings: Settings, config: ModelConfig, shapes: DummySource, torch: Any
) -> tuple[Fit, BoughError | None]:
    from bough.distributed.topology import Topology
    from bough.executor.build import CPU_CHUNK_TOKENS, CPU_ROWS, check_number_formats
    from bough.executor.load_model import check_split, multiplies_fp8, resolve_chunk
    from bough.executor.splits import weight_bytes_of
    from bough.loader.load import open_source, packed_size
    from bough.memory.pools.kv_pool import KVPool, cache_dtype

    on_gpu, ranks = _device(settings.model, torch) == "cuda", Topology(tp_size=settings.parallel.tp_size)
    capability = torch.cuda.get_device_capability() if on_gpu else None
    try:
        check_number_formats(settings, capability)
        check_split(config, ranks.tp_size)
    except SettingsError as error:
        return Fit(name, "does not fit"), error
    dtype = getattr(torch, _dtype_name(settings, torch))
    weight_bytes, cache_like = shapes.nbytes() // shapes.dtype.itemsize * dtype.itemsize, dtype
    backend = _attention_backend(settings, torch, config)
    numbers = weight_bytes_of(files, settings, "cuda" if on_gpu else "cpu", multiplies_fp8(capability or (0, 0)))
    if on_gpu and numbers < torch.bfloat16.itemsize:
        weight_bytes = _narrowed(weight_bytes, config, dtype.itemsize, numbers)
    if backend == "native":
        source = open_source(files, config) if files.gguf or files.safetensors else shapes
        weight_bytes, quantised = packed_size(source, settings.model.quantization)
        if source is shapes and settings.model.quantization == "auto" and numbers < torch.bfloat16.itemsize:
            weight_bytes, quantised = _narrowed(weight_bytes, config, shapes.dtype.itemsize, numbers), True
        cache_like = torch.float16 if quantised else dtype
    weight_bytes //= ranks.tp_size  # one rank is looked at
    of_groups = KVPool.bytes_per_token(config, cache_dtype(settings.memory.kv_cache_dtype, cache_like), ranks)
    fit = Fit(name, "does not fit", config.context_length, weight_bytes, sum(of_groups), attention_backend=backend)
    free, total = torch.cuda.mem_get_info() if on_gpu else (free_memory_bytes(), 0)
    share, most_rows = (sizing.GPU_FRACTION, sizing.GPU_ROWS) if on_gpu else (sizing.CPU_POOL_SHARE, CPU_ROWS)
    fitting = sizing.default_rows(config, most_rows, int(max(0, free - weight_bytes) * share))
    rows = settings.scheduler.max_running_requests or fitting
    chunk = resolve_chunk(settings, config, sizing.default_gpu_chunk(config) if on_gpu else CPU_CHUNK_TOKENS)
    shape = sizing.CacheShape.of(config, of_groups, settings.memory, rows, chunk)
    room: Facts = {"free_bytes": free - weight_bytes, "shape": shape}
    # An engine measures its largest step; here that is what such steps were seen to take.
    step = sizing.STEP_WIDTHS * (rows + chunk) * config.hidden_size * dtype.itemsize
    if weight_bytes > free:
        text = f"The weights of {name} take {gib(weight_bytes)}, more than the {gib(free)} that are free."
        return fit, ResourceError(text)
    try:
        if on_gpu:
            size = sizing.size_gpu_cache(settings.memory, total_bytes=total, activation_bytes=step, **room)
        else:
            context = config.context_length
            size = sizing.size_cpu_cache(settings.memory, weight_bytes=weight_bytes, context_length=context, **room)
    except ResourceError as error:
        return fit, error
    tokens = size.pages[0] * settings.memory.page_size
    return msgspec.structs.replace(fit, note=size.note, kv_tokens=tokens), None


def _narrowed(weight_bytes: int, config: ModelConfig, width: int, numbers: float) -> int:
    """The weights with so many bytes for a number instead of `width`, but for the vectors of the vocabulary."""
    tables = min(weight_bytes, 2 * config.vocab_size * config.hidden_size * width)
    return tables + int((weight_bytes - tables) // width * numbers)


def _requirements() -> list[tuple[str, str | None]]:
    """(package, extra) of everything that Bough names in its own metadata; torch alone where that is not installed."""
    try:
        stated = importlib.metadata.requires("bough") or []
    except importlib.metadata.PackageNotFoundError:
        return [("torch", None)]
    found = []
    for line in stated:
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", line)
        if name is not None:
            found.append((name[0], extra[1] if extra else None))
    return found


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
