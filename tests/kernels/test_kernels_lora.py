"""What adapters add, by each implementation against float64, and how rows are grouped.

The interpreter multiplies bfloat16 matrices as if they were integers, so that type is tested on a GPU only.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.lora import reference
from bough.kernels.lora import triton as fast
from bough.kernels.lora.reference import AdapterStack, GroupedRows, group_pairs, group_rows, tiles_of
from tests.kernels.closeness import assert_near

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
RANKS = [[16, 3, 0], [0, 0, 0], [1, 16, 9], [40, 128, 65]]  # of four slots, for each of three matrices
BANDS = (slice(0, 1100), slice(1100, 1120), slice(1120, 1158))


def stack_of(inputs: int, rank: int, dtype: torch.dtype, device: torch.device) -> AdapterStack:
    """Beyond an adapter's own rank nothing may be read: it is not a number."""
    torch.manual_seed(0)
    ranks = torch.tensor(RANKS, dtype=torch.int32).clamp(max=rank)
    down, up = torch.randn(4, 3, rank, inputs), torch.randn(4, BANDS[-1].stop, rank)
    for slot, of_slot in enumerate(ranks.tolist()):
        for matrix, own in enumerate(of_slot):
            down[slot, matrix, own:] = torch.nan
            up[slot, BANDS[matrix], own:] = torch.nan
    padded = torch.zeros(4, 5, dtype=torch.int32)  # they stand beside those of other layers
    padded[:, 1:4] = ranks
    tiles = torch.from_numpy(tiles_of(BANDS)).to(device)
    return AdapterStack(down.to(device, dtype), up.to(device, dtype), padded.to(device)[:, 1:4], tiles)


def grouped(slots: list[int], block_rows: int, padding: int, device: torch.device) -> GroupedRows:
    """More rows have larger blocks; the last ones are those of a graph that the step does not fill."""
    found = group_rows(torch.tensor(slots + [0] * padding, dtype=torch.int32, device=device), 4)
    assert found.block_rows == block_rows
    return found


def added(x: torch.Tensor, stack: AdapterStack, slots: list[int]) -> torch.Tensor:
    out = torch.zeros(len(x), BANDS[-1].stop, dtype=torch.float64, device=x.device)
    for row, slot in enumerate(slots):
        for matrix, band in enumerate(BANDS):
            rank = int(stack.ranks[slot - 1, matrix]) if slot else 0
            thin = stack.down[slot - 1, matrix, :rank].double() @ x[row].double()
            out[row, band] = stack.up[slot - 1, band, :rank].double() @ thin
    return out


@pytest.mark.parametrize("implementation", [reference.lora_, fast.lora_])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("inputs", "rank"), [(100, 16), (1100, 32), (64, 128)])
@pytest.mark.parametrize(("rows", "block_rows"), [(7, 16), (40, 16), (520, 64)])
def test_what_is_added_is_the_product_of_each_rows_adapter(
    implementation: object, dtype: torch.dtype, inputs: int, rank: int, rows: int, block_rows: int, device: torch.device
) -> None:
    if dtype == torch.bfloat16 and device.type != "cuda":
        pytest.skip("the interpreter cannot multiply this type")
    stack = stack_of(inputs, rank, dtype, device)
    slots = [n % 3 * (1 + n % 4) % 5 for n in range(rows)]  # none, and each of four
    assert rows < 40 or set(slots) == {0, 1, 2, 3, 4}
    x = torch.randn(rows, 2 * inputs, device=device).to(dtype)[:, :inputs]  # rows are strided
    product = torch.randn(rows, BANDS[-1].stop, device=device).to(dtype)
    expected = product.double() + added(x, stack, slots)
    plain = product.clone()
    implementation(product, x, stack, grouped(slots, block_rows, 3, device))  # type: ignore[operator]
    assert_near(product, expected, TOLERANCE[dtype])
    without = torch.tensor(slots) == 0
    assert torch.equal(product[without], plain[without])


def test_rows_are_grouped_by_slot_in_blocks() -> None:
    slots = torch.tensor([2, 0, 1] + [2] * 20 + [0, 7], dtype=torch.int32)
    found = group_rows(slots, 7)
    assert found.block_rows == 16 and found.order.tolist() == [1, 23, 2, 0, *range(3, 23), 24]
    assert found.blocks.tolist() == [[1, 2, 1], [2, 3, 16], [2, 19, 5], [7, 24, 1], *[[0, 0, 0]] * 4]
    assert not group_rows(torch.zeros(4, dtype=torch.int32), 16).blocks.any()


@pytest.mark.parametrize("tokens", [3, 40, 300])
@pytest.mark.parametrize("distinct", [1, 5])
def test_pairs_are_grouped_by_slot_and_expert(tokens: int, distinct: int) -> None:
    """All pairs of tokens with a slot are in one block, with others of the same slot and expert."""
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(tokens)]).int()
    slots = torch.arange(tokens, dtype=torch.int32) % (distinct + 1)
    stack = AdapterStack(torch.zeros(6 * distinct, 1, 16, 1), *(torch.zeros(1),) * 3, experts=6)
    pairs, found = group_pairs(ids, slots, stack), torch.zeros(2 * tokens, dtype=torch.int64)
    for slot, first, count in pairs.blocks.tolist():
        assert count <= pairs.block_rows
        found[pairs.order[first : first + count]] = slot
    expected = (slots[:, None] - 1) * 6 + ids + 1
    assert found.tolist() == expected.where(slots[:, None] > 0, 0).flatten().tolist()


def test_tiles_lie_within_one_matrix() -> None:
    expected = [[0, 0, 1024], [0, 1024, 1100], [1, 1100, 1120], [2, 1120, 1158]]
    assert tiles_of(BANDS).tolist() == [[*tile, tile[1]] for tile in expected]
    assert tiles_of(BANDS, (7, 0, 3)).tolist() == [
        [*tile, line] for tile, line in zip(expected, (7, 1031, 0, 3), strict=True)
    ]
