"""Which products take a measured algorithm, and what those compute."""

from __future__ import annotations

import pytest
import torch

from bough.kernels.tuned_linear import products as module
from bough.kernels.tuned_linear.cublaslt import Algorithm, CublasLt
from bough.kernels.tuned_linear.products import Products
from tests.kernels.closeness import assert_near

ROWS = 8192
EVEN = 2048  # rows of steps that come again and again


class FakeLibrary(CublasLt):
    """Never computes; supports an algorithm for even numbers of rows."""

    def __init__(self) -> None:
        pass

    def supports(self, algorithm: Algorithm, m: int, n: int, k: int, dtype: torch.dtype) -> bool:
        return m % 2 == 0


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Algorithm:
    """What measuring finds for weights with more than eight outputs."""
    algorithm = Algorithm()
    monkeypatch.setattr(module, "_fastest", lambda library, rows, weight: algorithm if len(weight) > 8 else None)
    return algorithm


def weight(outputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    tensor = torch.empty(outputs * 128 + 128, dtype=dtype)
    skip = -tensor.data_ptr() % 256 // tensor.element_size()
    return tensor[skip : skip + outputs * 128].view(outputs, 128)


def rows(count: int) -> torch.Tensor:
    return weight(count)


def tuned(*weights: torch.Tensor) -> Products:
    products = Products(FakeLibrary())
    products.prepare(ROWS, [], lambda: [products.find(rows(32), w) for w in weights])
    assert [products.tune() for _ in range(len(weights) + 1)] == [True] * len(weights) + [False]
    return products


def test_full_chunks_take_what_was_measured(faster: Algorithm) -> None:
    products = tuned(weight(16), weight(8))
    assert products.find(rows(ROWS), weight(16)) is faster
    assert products.find(rows(ROWS + 512), weight(16)) is faster
    assert products.find(rows(7000), weight(16)) is faster
    assert products.find(rows(ROWS), weight(8)) is None  # torch's is as good
    assert [products.serves(count) for count in (ROWS, 7000, 256)] == [True, True, False]
    assert not tuned(weight(8)).serves(ROWS)


def test_other_products_are_left_to_torch(faster: Algorithm) -> None:
    products = tuned(weight(16))
    assert products.find(rows(256), weight(16)) is None  # decodes
    assert products.find(rows(5000), weight(16)) is None  # too far from what was measured
    assert products.find(rows(ROWS - 1), weight(16)) is None  # the library cannot
    assert products.find(rows(ROWS), weight(32)) is None  # a weight that the forward pass did not show
    assert products.find(rows(ROWS + 1)[1:].clone()[:, :100], weight(16)) is None  # strided
    assert products.find(weight(ROWS + 1).view(-1)[8 : 8 + ROWS * 128].view(ROWS, 128), weight(16)) is None  # unaligned


def test_weights_outside_of_the_forward_pass_are_not_measured(faster: Algorithm) -> None:
    products = Products(FakeLibrary())
    products.find(rows(32), weight(16))
    products.prepare(ROWS, [], lambda: None)
    assert not products.tune()
    assert products.find(rows(ROWS), weight(16)) is None


def test_small_chunks_and_float32_are_not_measured(faster: Algorithm) -> None:
    products = Products(FakeLibrary())
    products.prepare(2048, [], lambda: products.find(rows(32), weight(16)))
    assert not products.tune()
    products.prepare(ROWS, [], lambda: products.find(rows(32), weight(16, torch.float32)))
    assert not products.tune()


def settled(others: list[int], *, chunk: int = ROWS) -> Products:
    products = Products(FakeLibrary())
    products.prepare(chunk, others, lambda: products.find(rows(32), weight(16)))
    while products.tune():
        pass
    return products


def test_other_numbers_of_rows_are_taken_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[int, Algorithm] = {}
    monkeypatch.setattr(module, "_fastest", lambda library, rows, weight: measured.setdefault(rows, Algorithm()))
    products = settled([1024, EVEN])
    assert list(measured) == [ROWS, EVEN, 1024]
    for count, algorithm in measured.items():
        assert products.find(rows(count), weight(16)) is algorithm
    for count in (1022, 1026, EVEN - 2, EVEN + 2):
        assert products.find(rows(count), weight(16)) is None


def test_where_torch_is_best_the_chunks_algorithm_is_not_taken(
    faster: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_fastest", lambda library, rows, weight: faster if rows == ROWS else None)
    products = settled([7168])
    assert products.find(rows(7168), weight(16)) is None
    assert products.find(rows(7166), weight(16)) is faster


def test_a_chunk_too_small_to_be_measured_leaves_the_other_numbers(faster: Algorithm) -> None:
    products = settled([1024], chunk=2048)
    assert products.find(rows(1024), weight(16)) is faster and products.find(rows(2048), weight(16)) is None


def test_a_second_engine_is_measured_for_itself(faster: Algorithm) -> None:
    products = tuned(weight(16))
    assert products.find(rows(ROWS), weight(16)) is faster and products.find(rows(ROWS), weight(24)) is None
    products.prepare(ROWS, [], lambda: products.find(rows(32), weight(24)))
    assert products.tune()
    assert products.find(rows(ROWS), weight(16)) is None and products.find(rows(ROWS), weight(24)) is faster


def test_a_device_without_room_leaves_products_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(module, "_fastest", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert tuned(weight(16)).find(rows(ROWS), weight(16)) is None


def test_without_the_library_nothing_is_found() -> None:
    products = module.products_on(torch.device("cpu"))
    products.prepare(ROWS, [], lambda: pytest.fail("nothing to measure for"))
    assert not products.tune()
    assert products.find(rows(ROWS), weight(16)) is None


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        ([[10.0, 9.0, 8.0], [10.0, 8.0]], "second"),
        ([[10.0, 9.0, 8.0], [10.0, 9.9]], None),  # it was luck
        ([[10.0, 9.9, 9.85]], None),
        ([[10.0, 12.0, 11.0]], None),
    ],
)
def test_an_algorithm_must_win_twice(
    measured: list[list[float]], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def proposals(self, *shape: object) -> list[str]:
            return ["first", "second"]

    left = iter(measured)
    monkeypatch.setattr(module, "_works", lambda *given: True)
    monkeypatch.setattr(module, "_heat", lambda *given: None)
    monkeypatch.setattr(module, "_measure", lambda *given: next(left))
    assert module._fastest(Library(), ROWS, weight(16)) == chosen  # type: ignore[arg-type, comparison-overlap]
    assert next(left, None) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(8192, 512, 1024), (256, 4096, 128), (48, 136, 72)])
def test_every_proposal_computes_the_product(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    library = CublasLt(torch.device("cuda", 0))
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    w = torch.randn(n, k, device="cuda", dtype=dtype)
    expected = x.double() @ w.double().T
    proposals = library.proposals(m, n, k, dtype)
    assert proposals
    for algorithm in proposals:
        assert library.supports(algorithm, m, n, k, dtype)
        result = library.multiply(algorithm, x, w, x.new_empty((m, n)))
        assert_near(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [ROWS, EVEN])
def test_measuring_on_a_device_finds_what_torch_computes(count: int) -> None:
    products = module.products_on(torch.device("cuda", 0))
    w = torch.randn(28672, 4096, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(count, 4096, device="cuda", dtype=torch.bfloat16)
    products.prepare(count, [count], lambda: products.find(x[:32], w))
    assert products.tune()
    algorithm = products.find(x, w)
    if algorithm is not None:  # torch's may be the fastest
        torch.testing.assert_close(products.multiply(algorithm, x, w), torch.nn.functional.linear(x, w))
