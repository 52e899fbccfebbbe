"""What Transformers' sources say of a model. They are read as text: to import a class of theirs takes seconds and loads
torch, in processes that need to know no more than a model's shape.
"""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MODEL_LIST = "models/auto/modeling_auto.py"
MULTIMODAL = "ForConditionalGeneration"  # how classes end that have encoders
WRITER = (
    rf'\("([^"]+)", "(\w+(?:ForCausalLM|LMHeadModel|{MULTIMODAL}))"\)'  # a model type, and a class that writes text
)
UNTYPED = ("model_type", "default_theta")  # attributes of a class that are no fields, and are read


def transformers_source(path: str) -> str:
    """A file of the package; empty where there is none."""
    package = find_spec("transformers")
    file = Path(package.origin).parent / path if package and package.origin else None
    return file.read_text(encoding="utf-8") if file and file.is_file() else ""


def writers() -> list[tuple[str, str]]:
    """Model types and their classes that write text, those with encoders last."""
    found = re.findall(WRITER, transformers_source(MODEL_LIST))
    return sorted(found, key=lambda pair: pair[1].endswith(MULTIMODAL))


def usual_fields(model_type: str) -> dict[str, Any]:
    """What the configuration class of a model type assumes where config.json is silent; of a multimodal model, the
    class of its language model. Defaults that are computed are not among them."""
    name = model_type.replace("-", "_")
    classes: dict[str, dict[str, Any]] = {}
    for node in ast.parse(transformers_source(f"models/{name}/configuration_{name}.py")).body:
        if isinstance(node, ast.ClassDef):
            fields = dict(_constants(node))
            classes[fields.pop("model_type", "")] = fields
    found = classes.get(f"{model_type}_text", classes.get(model_type, {}))
    if isinstance(theta := found.pop("default_theta", None), float):
        found["rope_theta"] = theta
    return found


def _constants(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """Its fields, or the defaults of its constructor, where the first releases of Transformers 5 have them, and which
    model it is. None is left out, as it stands for what config.json need not say."""
    for each in node.body:
        named: list[tuple[str, ast.expr | None]] = []
        if isinstance(each, ast.AnnAssign):
            named = [(ast.unparse(each.target), each.value)]
        elif isinstance(each, ast.Assign):
            named = [(name, each.value) for name in map(ast.unparse, each.targets) if name in UNTYPED]
        elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
            with_default = each.args.args[len(each.args.args) - len(each.args.defaults) :]
            named = [(arg.arg, value) for arg, value in zip(with_default, each.args.defaults, strict=True)]
        for name, value in named:
            try:
                constant = None if value is None else ast.literal_eval(value)
            except ValueError:  # it is computed
                continue
            if constant is not None:
                yield name, list(constant) if isinstance(constant, tuple) else constant
