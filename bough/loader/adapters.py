"""Reads LoRA adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors` in a folder.

Tensors are named after modules of the Transformers model. They become changes of the matrices of our model: one of a
fused module is cut, and its rows are put in our order, as the matrix itself is when it is loaded.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bough.core.control import ADAPTER_FILES
from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.core.settings import LoraSettings
from bough.layers.adapters import Adapter
from bough.loader.source import SafetensorsSource
from bough.models.names import find_tensors
from bough.models.registry import find_family

TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(embedding_)?(?P<side>[AB])(\.default)?(\.weight)?")
OWN_WEIGHT = ".base_layer.weight"  # the model's: PEFT saves it beside adapters of the embedding and of the head
# Fields of the configuration that ask for something that is not done here; `use_dora` is DoRA.
REFUSED = (
    "use_dora", "modules_to_save", "lora_bias", "layer_replication", "target_parameters", "trainable_token_indices",
    "use_qalora", "alora_invocation_tokens", "arrow_config", "ensure_weight_tying",
)  # fmt: skip
MOST_RANK = 256
CHANGE_WEIGHTS = ("pissa", "olora", "corda", "loftq")  # ways to begin a training that change the model itself, too


def read_adapter(
    path: str, config: ModelConfig, shapes: Mapping[str, tuple[int, int]], settings: LoraSettings
) -> tuple[Adapter, str]:
    """The adapter, for matrices that have these outputs and inputs, and what its files hash to."""
    folder, found, digest = Path(path).expanduser(), dict[str, Any](), hashlib.sha256()
    files = [folder / name for name in ADAPTER_FILES]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{folder} is no adapter: {file.name} is missing; give a folder that PEFT has saved.")
        digest.update(file.read_bytes())
    given, source, sides = _read_config(files[0]), SafetensorsSource([files[1]]), dict[str, dict[str, str]]()
    for name in (name for name in source.names() if not name.endswith(OWN_WEIGHT)):
        match = TENSOR.fullmatch(name)
        if match is None:
            raise ModelError(f"{files[1]}: {name!r} cannot be used; only lora_A and lora_B can.")
        sides.setdefault(match["module"], {})[match["side"]] = name
    names, targets = find_family(config.architecture).names(config), _targets(settings.lora_target_modules)
    for target, at in find_tensors(names, [f"{module}.weight" for module in sides], keep_others=True).items():
        module, ours = at.name.removesuffix(".weight"), target.removesuffix(".weight")
        if ours not in shapes or at.plane is not None or at.parts:
            raise ModelError(
                f"{folder} changes {module!r}, which adapters cannot change here; linear layers outside of experts "
                "can be changed, and on a CPU the embedding and the head. Train it for those, or merge it."
            )
        if targets and module.rpartition(".")[2] not in targets:
            raise ModelError(f"{folder} changes {module!r}, which --lora-target-modules does not name.")
        if len(sides[module]) < 2:
            raise ModelError(f"{folder}: of {module!r} only lora_{''.join(sides[module])} is there; fetch it again.")
        down, up = (source.read(sides[module][side]).float() for side in "AB")
        rank = len(down)
        if rank > (most := settings.max_lora_rank or MOST_RANK):
            raise ModelError(f"{folder} has rank {rank}, and at most {most} is allowed (--max-lora-rank, up to 256).")
        stored = [*up.shape], [*down.shape]
        if at.rows is not None:
            rows = list(range(len(up))[at.rows] if isinstance(at.rows, slice) else at.rows)
            up = up[rows] if max(rows, default=-1) < len(up) else up[:0]
        if (*up.shape, *down.shape) != (shapes[ours][0], rank, rank, shapes[ours][1]):
            raise ModelError(
                f"{folder} does not fit: B and A of {module!r} are {stored[0]} and {stored[1]}, and the model has "
                f"{shapes[ours][0]} x {shapes[ours][1]}; use the model that the adapter was trained for."
            )
        found[ours] = down, up * _scale(given, module, rank)
    return found, digest.hexdigest()


def _read_config(file: Path) -> dict[str, Any]:
    try:
        given = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file} cannot be read ({error}); fetch it again.") from None
    if not isinstance(given, dict) or given.get("peft_type", "LORA") != "LORA":
        raise ModelError(f"{file}: only adapters of peft_type 'LORA' can be loaded.")
    wrong = [name for name in REFUSED if given.get(name)]
    wrong += ["bias"] * (given.get("bias", "none") != "none")
    wrong += ["init_lora_weights"] * str(given.get("init_lora_weights")).startswith(CHANGE_WEIGHTS)
    if wrong:
        shown = "DoRA (use_dora)" if wrong[0] == "use_dora" else f"{wrong[0]} {given[wrong[0]]!r}"
        raise ModelError(f"{file}: adapters with {shown} cannot be loaded; merge it into the model.")
    if not isinstance(given.get("lora_alpha", 8), int | float):
        raise ModelError(f"{file}: lora_alpha must be a number, got {given['lora_alpha']!r}.")
    return given


def _targets(given: str | None) -> frozenset[str]:
    """What --lora-target-modules names; nothing where it means all."""
    names = [] if given is None else json.loads(given) if given.startswith("[") else given.replace(",", " ").split()
    return frozenset() if "all" in names else frozenset(map(str, names))


def _scale(given: Mapping[str, Any], module: str, rank: int) -> float:
    """PEFT's: patterns in `alpha_pattern` mean the ends of modules' names."""
    patterns = (given.get("alpha_pattern") or {}).items()
    own = (alpha for pattern, alpha in patterns if re.match(rf"(.*\.)?({pattern})$", module))
    alpha = float(next(own, given.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if given.get("use_rslora") else rank)
