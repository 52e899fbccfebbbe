"""Reads LoRA adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors` in a folder.

Tensors are named after modules of the Transformers model. They become changes of the matrices of our model: one of a
fused module is cut, and its rows are put in our order, as the matrix itself is when it is loaded. Experts are changed
one by one, or by a pair of tensors for the matrices of one kind of all (`target_parameters`).
"""

import functools
import hashlib
import json
import math
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import regex
import torch

from bough.core.control import ADAPTER_FILES
from bough.core.errors import ModelError
from bough.core.files import user_path
from bough.core.model_config import ModelConfig
from bough.core.settings import LoraSettings
from bough.kernels.lora.reference import MAX_RANK
from bough.layers.adapters import Adapter
from bough.loader.locate import there
from bough.loader.source import SafetensorsSource
from bough.models.names import find_tensors, module_names
from bough.models.registry import find_family

PATTERNS_S = 10.0  # for the patterns of an adapter
_compiled = functools.lru_cache(4096)(regex.compile)
EXPERT = re.compile(r"(?P<experts>.+\.experts\.)(?P<number>\d+)\.(?P<part>\w+)")  # one of our matrices
WRAPPED = ".base_layer"  # PEFT wraps a module once for each parameter that it changes: down_proj around gate_up_proj
TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(embedding_)?(?P<side>[AB])(\.default)?(\.weight)?")
OWN_WEIGHT = ".base_layer.weight"  # the model's: PEFT saves it beside adapters of the embedding and of the head
# Fields of the configuration that ask for something that is not done here; `use_dora` is DoRA.
REFUSED = (
    "use_dora", "modules_to_save", "lora_bias", "layer_replication", "trainable_token_indices",
    "use_qalora", "alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "use_bdlora", "kasa_config",
)  # fmt: skip
PARAMETERS = (".experts.gate_up_proj", ".experts.down_proj")  # of all experts of a layer
Thin = tuple[torch.Tensor, torch.Tensor]
CHANGE_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that change the model itself, too


def read_adapter(
    path: str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], settings: LoraSettings
) -> tuple[Adapter, str]:
    """The adapter, for matrices that have these outputs, inputs and experts, and what its files hash to."""
    folder, found, digest = user_path(path), dict[str, dict[int, Thin]](), hashlib.sha256()
    files = [folder / name for name in ADAPTER_FILES]
    for file in files:
        if not there(file.is_file):
            raise ModelError(f"{folder} is no adapter: {file.name} is missing; give a folder that PEFT has saved.")
        digest.update(file.read_bytes())
    given, source, sides = _read_config(files[0]), SafetensorsSource([files[1]]), dict[str, dict[str, str]]()
    for name in (name for name in source.names() if not name.endswith(OWN_WEIGHT)):
        match = TENSOR.fullmatch(name)
        if match is None:
            raise ModelError(f"{files[1]}: {name!r} cannot be used; only lora_A and lora_B can.")
        sides.setdefault(match["module"], {})[match["side"]] = name
    sides = {_parameter(module, sides, given): each for module, each in sides.items()}
    names, targets = module_names(find_family(config.architecture).names(config), config.moe), target_names(settings)
    due_s = time.monotonic() + PATTERNS_S
    read = functools.lru_cache(2)(lambda name: source.read(name).float())
    stored = [module if module.endswith(PARAMETERS) else f"{module}.weight" for module in sides]
    for target, at in find_tensors(names, stored, keep_others=True).items():
        module, ours, expert = at.name.removesuffix(".weight"), target.removesuffix(".weight"), 0
        if match := EXPERT.fullmatch(ours):
            ours, expert = match["experts"] + match["part"], int(match["number"])
        outputs, inputs, *experts = shapes.get(ours, (0, 0))
        if ours not in shapes:
            raise ModelError(
                f"{folder} changes {module!r}, which adapters cannot change here; linear layers, the embedding, the "
                "head and, without --ep-size, experts can be changed. Train it for those, or merge it."
            )
        if targets and targets.isdisjoint(("all", *(name.rpartition(".")[2] for name in (module, ours)))):
            raise ModelError(f"{folder} changes {module!r}, which --lora-target-modules does not name.")
        if len(sides[module]) < 2:
            raise ModelError(f"{folder}: of {module!r} only lora_{''.join(sides[module])} is there; fetch it again.")
        down, up = (read(sides[module][side]) for side in "AB")
        form = [*up.shape], [*down.shape]
        if at.plane is not None and experts and len(down) % experts[0] == up.shape[1] % experts[0] == 0:
            down, up = down.view(experts[0], -1, form[1][1])[at.plane], up.view(len(up), -1, experts[0])[..., at.plane]
            if down.shape[1] != inputs == len(up):  # which comes first in the parameter is up to PEFT's version
                down, up = up.T, down.T
        rank = len(down)
        if rank > (most := settings.max_lora_rank or MAX_RANK):
            raise ModelError(f"{folder} has rank {rank}, and at most {most} is allowed (--max-lora-rank, up to 256).")
        if at.rows is not None:
            rows = list(range(len(up))[at.rows] if isinstance(at.rows, slice) else at.rows)
            up = up[rows] if max(rows, default=-1) < len(up) else up[:0]
        if (*up.shape, *down.shape) != (outputs, rank, rank, inputs):
            raise ModelError(
                f"{folder} does not fit: B and A of {module!r} are {form[0]} and {form[1]}, and the model has "
                f"{outputs} x {inputs}; use the model that the adapter was trained for."
            )
        found.setdefault(ours, {})[expert] = down, up * _scale(given, module, rank, due_s)
    return {name: _stacked(own, *shapes[name]) for name, own in found.items()}, digest.hexdigest()


def _parameter(module: str, modules: Collection[str], given: Mapping[str, Any]) -> str:
    """The name of what PEFT's tensors of a module change: of experts, one of the two parameters that there are."""
    if module.endswith(f".experts{WRAPPED}"):
        return module.removesuffix(f".experts{WRAPPED}") + PARAMETERS[0]
    if not module.endswith(".experts"):
        return module
    changed = [f".experts.{name.rpartition('.')[2]}" for name in given.get("target_parameters") or ()]
    first = module + WRAPPED not in modules and PARAMETERS[1] not in changed
    return module.removesuffix(".experts") + PARAMETERS[0 if first else 1]


def _stacked(each: Mapping[int, Thin], outputs: int, inputs: int, experts: int = 0) -> Thin:
    """Those of all experts behind each other, with zeros for those that are left alone."""
    if not experts:
        return each[0]
    rank = max(len(down) for down, _ in each.values())
    downs, ups = torch.zeros(experts, rank, inputs), torch.zeros(experts, outputs, rank)
    for expert, (down, up) in each.items():
        downs[expert, : len(down)], ups[expert, :, : len(down)] = down, up
    return downs, ups


def _read_config(file: Path) -> dict[str, Any]:
    try:
        given = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file} cannot be read ({error}); fetch it again.") from None
    if not isinstance(given, dict) or given.get("peft_type", "LORA") != "LORA":
        raise ModelError(f"{file}: only adapters of peft_type 'LORA' can be loaded.")
    wrong = [name for name in REFUSED if given.get(name)]
    wrong += ["bias"] * (given.get("bias", "none") != "none")
    wrong += ["init_lora_weights"] * str(given.get("init_lora_weights")).lower().startswith(CHANGE_WEIGHTS)
    if wrong:
        shown = "DoRA (use_dora)" if wrong[0] == "use_dora" else f"{wrong[0]} {given[wrong[0]]!r}"
        raise ModelError(f"{file}: adapters with {shown} cannot be loaded; merge it into the model.")
    if not isinstance(given.get("lora_alpha", 8), int | float):
        raise ModelError(f"{file}: lora_alpha must be a number, got {given['lora_alpha']!r}.")
    return given


def target_names(settings: LoraSettings) -> frozenset[str]:
    """What --lora-target-modules names."""
    given = settings.lora_target_modules or ""
    return frozenset(map(str, json.loads(given) if given.startswith("[") else given.replace(",", " ").split()))


def _scale(given: Mapping[str, Any], module: str, rank: int, due_s: float) -> float:
    """PEFT's: patterns in `alpha_pattern` mean the ends of modules' names."""
    patterns = given.get("alpha_pattern") or {}

    def match(pattern: str) -> Any:  # else one could take for ever, or all of them together
        left_s = max(0.0, min(1.0, due_s - time.monotonic()))
        return _compiled(rf"(.*\.)?({pattern})$").match(module, timeout=left_s, concurrent=True)

    alpha = float(next((patterns[each] for each in patterns if match(each)), given.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if given.get("use_rslora") else rank)
