"""Kernels of two streams, and of graphs beside a stream, count in memory of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bough.kernels import overlap


def test_streams_and_graphs_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made, now = dict[tuple[object, ...], torch.Tensor](), SimpleNamespace(cuda_stream=7, capturing=False)

    def zeros(*key: object) -> torch.Tensor:
        assert not now.capturing or key in made, "a capture would not make it zero"
        return made.setdefault(key, torch.zeros(4))

    monkeypatch.setattr(overlap, "_zeros", zeros)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)

    def counters(purpose: str = "tiles") -> torch.Tensor:
        return overlap.zeros_of_stream(purpose, 4, torch.device("cuda", 0))

    first = counters()
    assert counters() is first and counters("pairs") is not first
    now.cuda_stream = 8
    second = counters()
    assert second is not first
    now.capturing = True
    assert counters() is not first and counters() is not second and counters() is counters()


def test_without_streams_there_is_one() -> None:
    found = overlap.zeros_of_stream("a test", 3, torch.device("cpu"))
    assert found.tolist() == [0, 0, 0] and found is overlap.zeros_of_stream("a test", 3, torch.device("cpu"))


@pytest.mark.gpu
def test_a_stream_of_a_gpu_has_its_own() -> None:
    device = torch.device("cuda", 0)
    main = overlap.zeros_of_stream("a test", 3, device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        assert overlap.zeros_of_stream("a test", 3, device).data_ptr() != main.data_ptr()
    assert overlap.zeros_of_stream("a test", 3, device) is main
