"""Where the tensors of a model stand in its checkpoint. Torch-free.

Layers name their tensors as Llama's checkpoints do. A family whose checkpoints differ has a map from their modules to
the model's: a module may have another name, hold several of the model's side by side, or be stored transposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Rows = slice | tuple[int, ...]  # which rows, in which order


@dataclass(frozen=True, slots=True)
class Piece:
    """What a module of the checkpoint holds of a module of the model."""

    module: str
    rows: Rows | None = None  # None: all of them, in order
    transposed: bool = False  # its matrix is stored [inputs, outputs]; `rows` then counts outputs


# From modules of a checkpoint, without `.weight` or `.bias`, to modules of the model. `*` stands for a number, the same
# on both sides. A name that ends in a dot is the beginning of many.
Names = Mapping[str, str | Piece | Sequence[Piece]]


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor of the model stands."""

    name: str
    rows: Rows | None = None
    transposed: bool = False


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
    return Piece(module, tuple(interleaved_rows(heads, head_dim, 0)))


def interleaved_rows(heads: int, head_dim: int, still: int) -> Iterator[int]:
    """The rows of such a module in the order in which halves are rotated, behind the first `still` of each head, which
    do not rotate."""
    for start in range(0, heads * head_dim, head_dim):
        yield from range(start, start + still)
        for side in (0, 1):
            yield from range(start + still, start + head_dim)[side::2]


def find_tensors(names: Names, stored: Iterable[str], *, keep_others: bool) -> dict[str, Stored]:
    """The model's tensors by name; those that `names` does not speak of have the same name in both, or are left out."""
    found = {}
    prefixes = {name: str(module) for name, module in names.items() if name.endswith(".")}
    for name in stored:
        module, _, kind = name.rpartition(".")
        numbers = [part for part in module.split(".") if part.isdigit()]
        pieces = names.get(".".join("*" if part.isdigit() else part for part in module.split(".")))
        if pieces is not None:
            for piece in _pieces(pieces):
                found[f"{_numbered(piece.module, numbers)}.{kind}"] = Stored(name, piece.rows, piece.transposed)
            continue
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            found[prefixes[prefix] + name.removeprefix(prefix)] = Stored(name)
        elif keep_others:
            found[name] = Stored(name)
    return found


def _pieces(given: str | Piece | Sequence[Piece]) -> Sequence[Piece]:
    if isinstance(given, str):
        return (Piece(given),)
    return (given,) if isinstance(given, Piece) else given


def _numbered(module: str, numbers: Sequence[str]) -> str:
    for number in numbers:
        module = module.replace("*", number, 1)
    return module


GGUF_NAMES: Names = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
    "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
    "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
    "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
    "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
}
