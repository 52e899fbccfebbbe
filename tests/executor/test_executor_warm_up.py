"""What only some requests need is compiled beside the loop, which never waits for it."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("triton")

from bough.executor import warm_up
from bough.executor.warm_up import WarmUp, rare_pieces


class Board:
    """Notes who did what."""

    def __init__(self) -> None:
        self.done: list[tuple[str, bool]] = []  # and whether by the loop's own thread
        self.gate = threading.Event()
        self._loop = threading.current_thread()

    def note(self, name: str) -> None:
        self.done.append((name, threading.current_thread() is self._loop))

    def wait_and_note(self, name: str) -> None:
        self.gate.wait()
        self.note(name)


def finish(warm: WarmUp) -> None:
    while warm.advance():
        pass


def test_pieces_run_in_order_on_a_thread_and_the_last_on_the_loops_own() -> None:
    board = Board()
    warm = WarmUp(
        [lambda: board.note("filters"), lambda: board.note("scores")],
        lambda: board.note("step"),
        lambda: board.note("enter"),
    )
    finish(warm)
    assert board.done == [("enter", False), ("filters", False), ("scores", False), ("step", True)]
    assert not warm.advance()


def test_the_loop_goes_on_while_a_piece_is_at_work() -> None:
    board = Board()
    warm = WarmUp([lambda: board.wait_and_note("filters")], lambda: board.note("step"))
    for _ in range(3):
        assert warm.advance()
    assert board.done == []
    board.gate.set()
    finish(warm)
    assert [name for name, _ in board.done] == ["filters", "step"]


def test_a_piece_that_fails_is_told_of_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    def fail() -> None:
        raise MemoryError("no room")

    warm_up = WarmUp([fail, lambda: done.append("next")], lambda: done.append("last"))
    while warm_up.advance():
        pass
    assert done == ["next", "last"]
    assert "no room" in caplog.text


def test_closing_leaves_out_what_has_not_begun() -> None:
    board = Board()
    warm = WarmUp([lambda: board.wait_and_note("filters"), lambda: board.note("scores")], lambda: board.note("step"))
    warm.advance()
    threading.Timer(0.05, board.gate.set).start()
    warm.close()
    assert board.done == [("filters", False)]


def test_closing_before_anything_began() -> None:
    WarmUp([], lambda: None).close()


@pytest.mark.parametrize(("dtype", "kinds"), [(torch.bfloat16, 2), (torch.float32, 1)])
def test_each_kind_of_logits_is_sampled_penalised_scored_and_masked(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kinds: int
) -> None:
    seen: list[tuple[str, torch.dtype]] = []
    drawn: list[tuple[torch.dtype, object]] = []
    for name in ("sample_rows", "penalise", "log_normaliser", "forbid_tokens_"):
        real = getattr(warm_up, name)

        def spy(logits: torch.Tensor, *more: object, name: str = name, real=real, **options: object) -> object:  # type: ignore[no-untyped-def]
            seen.append((name, logits.dtype))
            drawn.append((logits.dtype, options.get("filtered")))
            return real(logits, *more, **options)

        monkeypatch.setattr(warm_up, name, spy)
    for piece in rare_pieces(1000, dtype, torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        piece()
    assert len(set(seen)) == 4 * kinds
    assert set(drawn) >= {(dtype, True), (torch.float32, True), (torch.float32, False)}
