"""Figures of a serving run: the arithmetic, and the reports made of it."""

from __future__ import annotations

import base64
import builtins
import sys
from html.parser import HTMLParser
from typing import Any

import pytest

from bough.bench.backends import Record
from bough.bench.metrics import (
    draw_png,
    html_report,
    peak_concurrency,
    require_matplotlib,
    summarise,
    text_report,
    tokens_by_second,
)
from bough.core.errors import SettingsError

RUN = {"backend": "bough", "dataset_name": "random", "request_rate": "inf", "max_concurrency": None}


def record(began_s: float, first_s: float, gaps_s: list[float], **more: Any) -> Record:
    tokens = more.pop("output_tokens", 1 + len(gaps_s))
    total_s = first_s + sum(gaps_s)
    return Record(began_s, 10, tokens, more.pop("cached_tokens", 0), first_s, total_s, gaps_s, **more)


RECORDS = [
    record(0.0, 0.5, [0.25, 0.25], cached_tokens=4),
    record(0.5, 1.0, [0.5]),
    record(0.5, 0.0, [], output_tokens=0, error="503: busy"),
]


def test_figures_are_those_of_the_definitions() -> None:
    figures = summarise(RECORDS)
    assert (figures["completed"], figures["failed"], figures["first_error"]) == (2, 1, "503: busy")
    assert figures["duration"] == 2.0  # from the first request to the last token
    assert (figures["total_input_tokens"], figures["total_cached_tokens"], figures["total_output_tokens"]) == (20, 4, 5)
    assert (figures["request_throughput"], figures["input_throughput"]) == (1.0, 10.0)
    assert (figures["output_throughput"], figures["total_throughput"]) == (2.5, 12.5)
    assert figures["concurrency"] == (1.0 + 1.5) / 2.0
    assert figures["max_concurrent_requests"] == 2
    assert figures["mean_ttft_ms"] == figures["median_ttft_ms"] == 750.0
    assert figures["mean_tpot_ms"] == pytest.approx((250 + 500) / 2)
    assert figures["mean_itl_ms"] == pytest.approx(1000 / 3) and figures["median_itl_ms"] == 250.0
    assert figures["max_itl_ms"] == 500.0
    assert figures["mean_e2e_latency_ms"] == 1250.0 and figures["p99_e2e_latency_ms"] == pytest.approx(1495.0)


def test_nothing_that_succeeded_gives_zeros() -> None:
    figures = summarise([RECORDS[2]])
    assert figures["completed"] == 0 and figures["output_throughput"] == 0 and figures["p99_ttft_ms"] == 0
    assert "Failed requests" in text_report({**RUN, **figures})


def test_tokens_count_in_the_second_in_which_they_came() -> None:
    assert tokens_by_second(RECORDS[:2]) == [2.0, 2.0, 1.0]
    # Six tokens in two chunks: the server did not say how they were shared out.
    assert tokens_by_second([record(0.0, 0.5, [1.0], output_tokens=6)]) == [3.0, 3.0]


def test_a_closed_loop_never_has_more_than_its_users() -> None:
    turns = [record(float(i), 0.5, [0.5]) for i in range(5)]
    assert peak_concurrency(turns) == 1


class Links(HTMLParser):
    """Gathers what a page would load, and checks that its tags match."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_valid_and_needs_nothing_else() -> None:
    result = {**RUN, **summarise(RECORDS), "first_error": "<script>alert('x')</script>"}
    page = html_report(result, {"tag": "<b>"}, b"a picture")
    links = Links()
    links.feed(page)
    assert not links.open and links.loads == [f"data:image/png;base64,{base64.b64encode(b'a picture').decode()}"]
    assert "<script" not in page and "&lt;script&gt;" in page and "&lt;b&gt;" in page


@pytest.mark.parametrize("records", [RECORDS, []])
def test_a_run_is_drawn(records: list[Record]) -> None:
    assert draw_png(records, "a run").startswith(b"\x89PNG\r\n\x1a\n")


def test_a_missing_matplotlib_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name == "matplotlib":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SettingsError, match=r"pip install 'bough\[bench\]'"):
        require_matplotlib()
