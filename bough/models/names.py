"""Where the tensors of a model stand in its checkpoint. Torch-free.

Layers name their tensors as Llama's checkpoints do. A family whose checkpoints differ has a map from their modules to
the model's: a module may have another name, hold several of the model's side by side or in planes, or be stored
transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bough.core.files import table_beside
from bough.core.model_config import ModelConfig, MoEConfig

Rows = slice | tuple[int, ...]  # which rows, in which order


@dataclass(frozen=True, slots=True)
class Piece:
    """What a module of the checkpoint holds of a module of the model."""

    module: str
    rows: Rows | None = None  # None: all of them, in order
    transposed: bool = False  # its matrix is stored [inputs, outputs]; `rows` then counts outputs
    plane: int | None = None  # which place of the tensor's first dimension it has; the others are what is left
    place: int | None = None  # of its rows among those of the module; None: it has all of them
    straight: tuple[int, int] | None = None  # the shape in which it is not transposed after all
    made: Callable[[Any], Any] | None = None  # what it is made of the tensor by, which is then read whole: a small one


# From modules of a checkpoint, without `.weight` or `.bias`, to modules of the model; or from whole names of tensors to
# such. `*` stands for a number, the same on both sides. A name that ends in a dot is the beginning of many, of
# which the longest counts, where no other name does.
Names = Mapping[str, str | Piece | Sequence[Piece]]
GgufNames = dict[str, Sequence[Piece]]  # of a GGUF file


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor of the model stands."""

    name: str
    rows: Rows | None = None
    transposed: bool = False
    plane: int | None = None
    straight: tuple[int, int] | None = None
    made: Callable[[Any], Any] | None = None
    parts: tuple[Stored, ...] = ()  # those in whose rows it stands, in their order; `name` then means nothing


def fused(modules: Sequence[str], sizes: Sequence[int], *, groups: int = 1, transposed: bool = False) -> list[Piece]:
    """Modules whose rows stand in one matrix: `sizes` rows of each in turn, and that `groups` times over."""
    pieces, start, width = [], 0, sum(sizes)
    for module, size in zip(modules, sizes, strict=True):
        rows: Rows = slice(start, start + size)
        if groups > 1:
            rows = tuple(group * width + row for group in range(groups) for row in range(start, start + size))
        pieces.append(Piece(module, rows, transposed))
        start += size
    return pieces


def interleaved(module: str, heads: int, head_dim: int) -> Piece:
    """A module whose heads are stored for a rotation of neighbouring coordinates; here halves are rotated."""
    return _apart(Piece(module), heads, head_dim, head_dim, neighbours=True)


def pairs_apart(query: Piece, key: Piece, config: ModelConfig, *, neighbours: bool = False) -> list[Piece]:
    """Queries and keys whose heads rotate their first coordinates, in pairs of neighbours or of the halves of that
    part; here pairs stand half a head apart (`RopeConfig.apart`). Attention does not depend on the order."""
    dim, rotary_dim = config.head_dim, config.rope.rotary_dim(config.head_dim)
    queries = _apart(query, config.num_heads, dim, rotary_dim, neighbours)
    return [queries, _apart(key, config.num_kv_heads, dim, rotary_dim, neighbours)]


def projections_apart(config: ModelConfig, *, neighbours: bool = False) -> dict[str, Piece]:
    """The same for projections that have Llama's names."""
    query, key = (Piece(f"model.layers.*.self_attn.{part}_proj") for part in "qk")
    return {piece.module: piece for piece in pairs_apart(query, key, config, neighbours=neighbours)}


def fused_gate_up(config: ModelConfig) -> dict[str, list[Piece]]:
    """The rows of an MLP's gate, then those of what it gates."""
    parts = [f"model.layers.*.mlp.{part}_proj" for part in ("gate", "up")]
    return {"model.layers.*.mlp.gate_up_proj": fused(parts, (config.intermediate_size,) * 2)}


def fused_qkv(config: ModelConfig) -> list[Piece]:
    """The rows of all queries, of all keys and of all values, of which queries and keys are put apart."""
    modules = [f"model.layers.*.self_attn.{part}_proj" for part in "qkv"]
    sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    query, key, value = fused(modules, sizes)
    return [*pairs_apart(query, key, config), value]


def _apart(piece: Piece, heads: int, head_dim: int, rotary_dim: int, neighbours: bool) -> Piece:
    turned, still, half = range(rotary_dim), range(rotary_dim, head_dim), rotary_dim // 2
    first, second = (turned[::2], turned[1::2]) if neighbours else (turned[:half], turned[half:])
    middle = len(still) // 2
    order = (*first, *still[:middle], *second, *still[middle:])
    rows = piece.rows or slice(0, heads * head_dim)
    taken = range(rows.start, rows.stop) if isinstance(rows, slice) else rows
    return replace(piece, rows=tuple(taken[head * head_dim + at] for head in range(heads) for at in order))


def interleaved_rows(heads: int, head_dim: int, turned: slice) -> Iterator[int]:
    """The rows of such a module in the order in which halves are rotated: of each head `turned`, the rest does not
    rotate."""
    order = list(range(head_dim))
    order[turned] = [*order[turned][::2], *order[turned][1::2]]
    for start in range(0, heads * head_dim, head_dim):
        yield from (start + row for row in order)


def find_tensors(names: Names, stored: Iterable[str], *, keep_others: bool) -> dict[str, Stored]:
    """The model's tensors by name; those that `names` does not speak of have the same name in both, or are left out."""
    found: dict[str, Stored] = {}
    parts: dict[str, dict[int, Stored]] = {}
    prefixes = {name: pieces_of(given)[0].module for name, given in names.items() if name.endswith(".")}
    for name in stored:
        numbers = [part for part in name.split(".") if part.isdigit()]
        whole, kind = ".".join("*" if part.isdigit() else part for part in name.split(".")), ""
        pattern = whole
        if pattern not in names:
            pattern, _, kind = pattern.rpartition(".")
        if pattern in names:
            for piece in pieces_of(names[pattern]):
                target = ".".join(filter(None, (_numbered(piece.module, numbers), kind)))
                at = Stored(name, piece.rows, piece.transposed, piece.plane, piece.straight, piece.made)
                if piece.place is None:
                    found[target] = at
                else:
                    parts.setdefault(target, {})[piece.place] = at
            continue
        prefix = max(filter(whole.startswith, prefixes), key=len, default=None)
        if prefix is not None:
            rest = name.split(".", prefix.count("."))[-1]
            found[_numbered(prefixes[prefix], numbers) + rest] = Stored(name)
        elif keep_others:
            found[name] = Stored(name)
    for name, each in parts.items():
        found[name] = Stored(name, parts=tuple(each[place] for place in sorted(each)))
    return found


def pieces_of(given: str | Piece | Sequence[Piece]) -> Sequence[Piece]:
    if isinstance(given, str):
        return (Piece(given),)
    return (given,) if isinstance(given, Piece) else given


def _numbered(module: str, numbers: Sequence[str]) -> str:
    for number in numbers:
        module = module.replace("*", number, 1)
    return module


# A multimodal checkpoint's language model, in the ways that Transformers has nested it.
NESTED: Names = {
    "language_model.model.model.": "model.",  # as 5.17 writes Qwen2-Audio
    "language_model.model.": "model.",
    "language_model.": "model.",  # NVIDIA's files of Kimi K2.5
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}


def nested(names: Names) -> Names:
    """The same names, for checkpoints of a language model alone and of a multimodal one around it."""
    inner = {name.removeprefix("model."): pieces for name, pieces in names.items()}
    prefixes = [prefix for prefix, ours in NESTED.items() if ours == "model."]
    return {prefix + name: pieces for prefix in ("model.", *prefixes) for name, pieces in inner.items()} | dict(NESTED)


def module_names(names: Names, moe: MoEConfig | None) -> Names:
    """The same, and as Transformers' modules have experts, also those of checkpoints that have them one by one."""
    if moe is not None:
        for block in ("mlp", "block_sparse_moe", "feed_forward"):
            names = {**nested(fused_experts(f"model.layers.*.{block}.experts", moe)), **names}
    return names


GGUF_MODULES = table_beside(__file__, "gguf_modules.toml")  # llama.cpp's names of modules, and the model's
# Of models with norms before and after attention and MLP, and of those whose gates stand in one matrix with the ups.
GGUF_SANDWICH = {"blk.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm"}
GGUF_FUSED_MLP = {"blk.*.ffn_up": "model.layers.*.mlp.gate_proj"}
# What the converter has changed: rates of which other checkpoints have the logarithms, and dimensions of one place, but
# for those of biases.
GGUF_MADE: Mapping[str, Callable[[Any], Any]] = {
    "ssm_a": lambda rates: rates.flatten().neg().log(),
    **dict.fromkeys(("ssm_d", "ssm_norm"), lambda tensor: tensor.flatten()),
    **dict.fromkeys(("ssm_conv1d", "shortconv.conv"), lambda conv: conv[:, None] if conv.dim() == 2 else conv),
}


def gguf_names(names: Names, modules: Mapping[str, str], config: ModelConfig) -> GgufNames:
    """Where the `modules` stand in a GGUF file: what is fused or ordered otherwise in `names` is so there, too. Nothing
    is transposed, and matrices of one kind of all experts are in one tensor."""
    stored = [pieces_of(given) for given in names.values()]
    pieces = {each[0].module: [replace(piece, transposed=False) for piece in each] for each in stored}
    found: GgufNames = {}
    for name, module in modules.items():
        at = [piece for piece in pieces.get(module, []) if piece.plane is None] or [Piece(module)]
        found[name] = [replace(piece, made=GGUF_MADE.get(name.removeprefix("blk.*."))) for piece in at]
    if config.moe is not None:
        experts, inner = config.moe.experts, config.moe.intermediate_size
        found |= {f"blk.*.ffn_{part}_exps": planes(f"{part}_proj", experts) for part in ("gate", "up", "down")}
        gates = planes("gate_proj", experts, slice(0, inner))
        found["blk.*.ffn_gate_up_exps"] = gates + planes("up_proj", experts, slice(inner, 2 * inner))
    return found


def planes(part: str, experts: int, rows: Rows | None = None, **way: Any) -> list[Piece]:
    """A part of each expert, in a tensor that has them behind each other; `way` are further fields of a `Piece`."""
    modules = (f"model.layers.*.mlp.experts.{expert}.{part}" for expert in range(experts))
    return [Piece(module, rows, plane=plane, **way) for plane, module in enumerate(modules)]


def fused_experts(module: str, moe: MoEConfig, *, transposed: bool = False, hidden: int | None = None) -> Names:
    """The experts' matrices behind each other in `module`, the rows of a gate before those of what it gates. With
    the model's `hidden` size, those that are not transposed are told by their shape."""
    count, inner = moe.experts, moe.intermediate_size
    upwards = {"transposed": transposed, "straight": None if hidden is None else (2 * inner, hidden)}
    gates = planes("gate_proj.weight", count, slice(0, inner), **upwards)
    ups = planes("up_proj.weight", count, slice(inner, 2 * inner), **upwards)
    straight = None if hidden is None else (hidden, inner)
    downs = planes("down_proj.weight", count, transposed=transposed, straight=straight)
    return {f"{module}.gate_up_proj": [*gates, *ups], f"{module}.down_proj": downs}
