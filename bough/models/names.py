"""Where the tensors of a model stand in its checkpoint. Torch-free.

Layers name their tensors as Llama's checkpoints do. A family whose checkpoints differ has a map from their modules to
the model's: a module may have another name, hold several of the model's side by side or in planes, or be stored
transposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Rows = slice | tuple[int, ...]  # which rows, in which order


@dataclass(frozen=True, slots=True)
class Piece:
    """What a module of the checkpoint holds of a module of the model."""

    module: str
    rows: Rows | None = None  # None: all of them, in order
    transposed: bool = False  # its matrix is stored [inputs, outputs]; `rows` then counts outputs
    plane: int | None = None  # which place of the tensor's first dimension it has; the others are what is left


# From modules of a checkpoint, without `.weight` or `.bias`, to modules of the model; or from whole names of tensors to
# such. `*` stands for a number, the same on both sides. A name that ends in a dot is the beginning of many.
Names = Mapping[str, str | Piece | Sequence[Piece]]


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor of the model stands."""

    name: str
    rows: Rows | None = None
    transposed: bool = False
    plane: int | None = None


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
    starts = range(0, heads * head_dim, head_dim)
    return Piece(
        module, tuple(row for start in starts for side in (0, 1) for row in range(start, start + head_dim)[side::2])
    )


def find_tensors(names: Names, stored: Iterable[str], *, keep_others: bool) -> dict[str, Stored]:
    """The model's tensors by name; those that `names` does not speak of have the same name in both, or are left out."""
    found = {}
    prefixes = {name: str(module) for name, module in names.items() if name.endswith(".")}
    for name in stored:
        numbers = [part for part in name.split(".") if part.isdigit()]
        pattern, kind = ".".join("*" if part.isdigit() else part for part in name.split(".")), ""
        if pattern not in names:
            pattern, _, kind = pattern.rpartition(".")
        if pattern in names:
            for piece in _pieces(names[pattern]):
                target = ".".join(filter(None, (_numbered(piece.module, numbers), kind)))
                found[target] = Stored(name, piece.rows, piece.transposed, piece.plane)
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
    "blk.*.ffn_gate_inp": "model.layers.*.mlp.gate",
    "blk.*.ffn_gate_inp_shexp": "model.layers.*.mlp.shared_expert_gate",
    "blk.*.exp_probs_b.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    **{f"blk.*.ffn_{part}_shexp": f"model.layers.*.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}


def gguf_experts(experts: int) -> Names:
    """llama.cpp keeps the matrices of one kind of all experts in one tensor."""
    return {f"blk.*.ffn_{part}_exps": planes(f"{part}_proj", experts) for part in ("gate", "up", "down")}


def planes(part: str, experts: int, rows: Rows | None = None, *, transposed: bool = False) -> list[Piece]:
    """A part of each expert, in a tensor that has them behind each other."""
    modules = (f"model.layers.*.mlp.experts.{expert}.{part}" for expert in range(experts))
    return [Piece(module, rows, transposed, plane) for plane, module in enumerate(modules)]
