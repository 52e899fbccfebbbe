"""Compiling: in threads and worker processes, cached, bounded in time, one refusal per request."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from bough.constrained import xgrammar_backend
from bough.constrained.compiler import CachingCompiler
from bough.constrained.compiler_process import CompilerPool, Hello
from bough.constrained.interface import Compiled, GrammarSpec, Ticket
from bough.constrained.llguidance_backend import LLGuidanceBackend, LLGuidanceMatcher
from bough.constrained.prepare import prepare
from bough.constrained.vocabulary import Vocabulary
from bough.core.errors import RequestError, SettingsError
from bough.core.pipe_process import PipeProcess
from tests.constrained.walks import BYTES, accepts, backend_of, matcher_of
from tests.fakes.grammar_specs import choice_spec, ebnf_spec, json_schema_spec, regex_spec, structural_tag_spec

HEAVY = regex_spec("[a-z]{1,80}[0-9]")  # beyond what is compiled in a thread


@pytest.fixture(scope="module", params=["llguidance", "outlines-core", "xgrammar"])
def compiler(request: pytest.FixtureRequest) -> Iterator[CachingCompiler]:
    built = CachingCompiler(request.param, lambda: BYTES, timeout_s=30.0)
    yield built
    built.close()


def wait(ticket: Ticket) -> Compiled:
    while not ticket.done:
        time.sleep(0.002)
    return ticket.result()


def test_a_small_grammar_is_compiled_and_walked(compiler: CachingCompiler) -> None:
    matcher = wait(compiler.request(choice_spec(["yes", "no", "maybe (later)"]))).matcher()
    assert all(accepts(matcher, text) for text in ("yes", "no", "maybe (later)"))
    assert not any(accepts(matcher, text) for text in ("ye", "yesno", ""))


@pytest.mark.slow
def test_a_large_grammar_is_compiled_in_a_process(compiler: CachingCompiler) -> None:
    matcher = wait(compiler.request(HEAVY)).matcher()
    assert accepts(matcher, "abc7") and not accepts(matcher, "abc")


def test_equal_specs_share_one_grammar(compiler: CachingCompiler) -> None:
    first = wait(compiler.request(regex_spec("[ab]c")))
    assert wait(compiler.request(regex_spec("[ab]c"))) is first
    one, other = first.matcher(), first.matcher()
    assert one.accept(ord("a")) and not other.accept(ord("c"))


def test_a_refusal_concerns_its_own_request(compiler: CachingCompiler) -> None:
    bad, good = compiler.request(regex_spec("a(?=b)")), compiler.request(regex_spec("a+"))
    with pytest.raises(RequestError, match="look-around"):
        wait(bad)
    assert accepts(wait(good).matcher(), "aa")


def test_what_is_not_enforced_is_told(compiler: CachingCompiler) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    compiled = wait(compiler.request(json_schema_spec(schema, strict=False)))
    assert [warning.split()[0] for warning in compiled.warnings] == ["json_schema#/uniqueItems"]


def test_a_cancelled_request_may_be_asked_again(compiler: CachingCompiler) -> None:
    tickets = [compiler.request(regex_spec(f"x{index}")) for index in range(20)]
    for ticket in tickets:
        ticket.cancel()
        ticket.cancel()  # twice is once
    assert accepts(wait(compiler.request(regex_spec("x19"))).matcher(), "x19")


def test_what_takes_too_long_ends_alone() -> None:
    """outlines-core writes out an automaton with two to the twenty-second states here, which takes it minutes."""
    compiler = CachingCompiler("outlines-core", lambda: BYTES, timeout_s=1.0)
    bomb = regex_spec("(a|b)*a(a|b){22}")
    try:
        slow, quick = compiler.request(bomb), compiler.request(regex_spec("ok"))
        assert accepts(wait(quick).matcher(), "ok")
        for ticket in (slow, compiler.request(bomb)):
            with pytest.raises(RequestError, match="grammar-timeout-s"):
                wait(ticket)
    finally:
        compiler.close()


@pytest.mark.parametrize("limit", [{"cache_entries": 2}, {"cache_text": 2 * len(regex_spec("y0").text) + 1}])
def test_the_cache_forgets_what_was_not_asked_for_long(limit: dict[str, int]) -> None:
    compiler = CachingCompiler("llguidance", lambda: BYTES, **limit)
    try:
        specs = [regex_spec(f"y{index}") for index in range(3)]
        first = wait(compiler.request(specs[0]))
        for spec in specs[1:]:
            wait(compiler.request(spec))
        second = wait(compiler.request(specs[1]))
        assert wait(compiler.request(specs[0])) is not first
        assert wait(compiler.request(specs[1])) is second
    finally:
        compiler.close()


COUNTED = json_schema_spec({"type": "array", "items": {"type": "string", "maxLength": 100}})
PERCENT = {"type": "number", "minimum": 0.5, "maximum": 99.5}


@pytest.mark.parametrize(
    "spec",
    [
        COUNTED,
        json_schema_spec({"type": "object", "properties": {f"p{i}": PERCENT | {"minimum": i} for i in range(60)}}),
        json_schema_spec(
            {
                "type": "object",
                "properties": {f"p{i}": {"type": "null"} for i in range(30)},
                "maxProperties": 15,
            }
        ),
        structural_tag_spec({"type": "structural_tag", "format": {"type": "regex", "pattern": "[a-z]{999}"}}),
        structural_tag_spec(
            {"type": "structural_tag", "format": {"type": "grammar", "grammar": "root ::= [a-z]{999}"}}
        ),
    ],
)
def test_what_is_short_to_write_and_long_to_compile_has_a_clock(spec: GrammarSpec) -> None:
    assert not prepare(spec, "xgrammar").light


def test_an_everyday_schema_needs_no_process() -> None:
    names = {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}
    assert prepare(json_schema_spec({"type": "object", "properties": names | {"share": PERCENT}}), "xgrammar").light


def test_masks_that_states_share_are_not_written_out_for_each_to_cross_processes() -> None:
    """The library would write megabytes of them, for seconds."""
    backend = backend_of("xgrammar")
    spec = prepare(COUNTED, "xgrammar").spec
    payload = backend.compile(spec)
    assert len(payload) < 2 * len(spec.text)
    make = backend.load(spec, payload)
    assert accepts(make(), '["a", "b"]') and not accepts(make(), f'["{"a" * 101}"]')


def test_what_took_long_to_compile_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgrammar_backend, "QUICK_S", 0.0)
    backend = backend_of("xgrammar")
    spec = regex_spec("a+b")
    payload = backend.compile(spec)
    monkeypatch.setattr(backend, "_compile", None)  # which would compile
    assert accepts(backend.load(spec, payload)(), "aab")


def no_more_processes(*_: object, **__: object) -> None:
    raise OSError("no more processes")


def test_what_is_no_fault_of_the_grammar_fails_its_request_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = CachingCompiler("llguidance", lambda: BYTES)
    try:
        with monkeypatch.context() as broken:
            broken.setattr("subprocess.Popen", no_more_processes)
            with pytest.raises(RequestError, match="no more processes") as failed:
                wait(compiler.request(regex_spec("ok")))
            assert failed.value.status_code == 500
        with monkeypatch.context() as broken:
            broken.setattr("sys.executable", "/bin/false")
            with pytest.raises(RequestError, match="did not start"):
                wait(compiler.request(regex_spec("ok")))
        assert accepts(wait(compiler.request(regex_spec("ok"))).matcher(), "ok")
    finally:
        compiler.close()


# Workers --------------------------------------------------------------------------------------------------------------


def preparers_with(timeout_s: float) -> CompilerPool:
    return CompilerPool(Hello("xgrammar", None, timeout_s), 1, "preparing")


@pytest.fixture(scope="module")
def preparers() -> Iterator[CompilerPool]:
    pool = preparers_with(60.0)
    yield pool
    pool.close()


class LateSelector(selectors.DefaultSelector):
    """Looks once more, a while after something has happened, as a thread does that gets its core late."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        super().select(timeout)
        time.sleep(0.2)
        return super().select(0)


def test_whoever_waits_for_a_worker_notices_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selectors.DefaultSelector", LateSelector)
    worker = PipeProcess("bough.constrained.compiler_process")
    os.kill(worker._process.pid, signal.SIGSTOP)  # it will not answer
    threading.Timer(0.3, worker.end).start()
    with pytest.raises((EOFError, ConnectionError)):  # not a TimeoutError, long after
        worker.ask(b"", 60.0)


def test_preparing_has_a_limit_too_and_its_worker_goes_on() -> None:
    pool = preparers_with(1e-6)  # which nothing can keep
    try:
        for _ in range(2):
            with pytest.raises(RequestError, match="preparing it takes longer than 1e-06 s"):
                pool.ask(regex_spec("c+"))
            (worker,) = pool._running
            assert worker._process.poll() is None
    finally:
        pool.close()


def test_a_refusal_crosses_with_its_field(preparers: CompilerPool) -> None:
    with pytest.raises(RequestError, match="line 1") as refused:
        preparers.ask(ebnf_spec("root ::= ("))
    assert refused.value.field == "ebnf"


def test_a_long_chain_of_rules_is_no_defect(preparers: CompilerPool) -> None:
    chain = [f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(500)]
    with pytest.raises(RequestError, match="too deep to be followed; make it flatter"):
        preparers.ask(ebnf_spec("\n".join(["root ::= r0", *chain, 'r500 ::= "b"'])))


def test_a_grammar_whose_worker_dies_is_tried_once_more(
    preparers: CompilerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = preparers.ask(regex_spec("b"))
    (worker,) = preparers._running
    worker._process.kill()
    assert preparers.ask(regex_spec("b")) == expected
    starts = list[bool]()

    def start_and_die(pool: CompilerPool) -> PipeProcess:
        starts.append(True)
        raise EOFError

    monkeypatch.setattr(CompilerPool, "_start", start_and_die)
    (worker,) = preparers._running
    worker._process.kill()
    with pytest.raises(RequestError, match="memory or stack"):
        preparers.ask(regex_spec("c"))
    assert len(starts) == 2  # one for each try
    monkeypatch.undo()
    assert preparers.ask(regex_spec("c"))


def test_what_nobody_follows_in_bounded_time_says_so(preparers: CompilerPool) -> None:
    text, word = {"type": "any_text"}, {"type": "regex", "pattern": "a*"}
    tag = {"type": "sequence", "elements": [text, {"type": "star", "content": word}, text, word]}
    with pytest.raises(RequestError, match=r"many ways at once.*one character decides"):
        preparers.ask(structural_tag_spec({"type": "structural_tag", "format": tag}))


def test_an_ambiguous_grammar_is_followed_by_the_back_end_that_bounds_its_masks() -> None:
    compiler = CachingCompiler("xgrammar", lambda: BYTES)
    try:
        matcher = wait(compiler.request(regex_spec(r"(\w+\s?)*\."))).matcher()
        assert isinstance(matcher, LLGuidanceMatcher) and accepts(matcher, "one two.") and not accepts(matcher, "one")
    finally:
        compiler.close()


def test_a_schema_of_many_values_is_followed_by_the_back_end_that_takes_them_one_by_one() -> None:
    many = json_schema_spec({"type": "array", "items": {"enum": [f"value {i}" for i in range(2000)]}})
    assert prepare(many, "xgrammar").backend == "llguidance"
    few = json_schema_spec({"type": "array", "items": {"enum": [f"value {i}" for i in range(200)]}})
    assert prepare(few, "xgrammar").backend == "xgrammar"


@pytest.mark.parametrize(
    "spec",
    [
        json_schema_spec({"type": "array", "items": {"type": "integer", "multipleOf": 509}}),
        json_schema_spec({"type": "string", "format": "email", "maxLength": 254}),
    ],
)
def test_what_only_llguidance_can_count_is_followed_by_it(spec: GrammarSpec) -> None:
    assert {prepare(spec, name).backend for name in ("xgrammar", "llguidance", "outlines-core")} == {"llguidance"}


def test_outlines_core_follows_regular_expressions_and_llguidance_the_rest() -> None:
    recursive = ebnf_spec('root ::= "(" root ")" | "x"')
    for spec in (regex_spec("a+"), choice_spec(["a", "b"]), ebnf_spec('root ::= "a" b\nb ::= "b"+')):
        assert prepare(spec, "outlines-core").backend == "outlines-core"
    for spec in (recursive, json_schema_spec({"type": "object"})):
        assert prepare(spec, "outlines-core").backend == "llguidance"


def test_a_tag_that_llguidance_cannot_write_keeps_long_strings_and_not_multiples() -> None:
    def tag(schema: dict[str, object]) -> GrammarSpec:
        elements = [{"type": "any_text"}, {"type": "json_schema", "json_schema": schema}]
        return structural_tag_spec({"format": {"type": "sequence", "elements": elements}})

    assert prepare(tag({"type": "string", "maxLength": 2000}), "xgrammar").backend == "xgrammar"
    with pytest.raises(RequestError, match="cannot enforce any_text at this place"):
        prepare(tag({"type": "integer", "multipleOf": 7}), "xgrammar")


def test_a_limit_of_the_library_is_told_when_it_was_met_on_the_way() -> None:
    matcher = matcher_of(json_schema_spec({"enum": [[i] for i in range(2100)]}), "llguidance")
    mask = np.zeros(BYTES.mask_words, np.int32)
    matcher.fill(mask)
    matcher.accept(ord("["))  # from where it would have to follow 2,100 readings
    with pytest.raises(RequestError, match=r"cannot be followed any further: .*2100 items"):
        matcher.fill(mask)


def test_a_grammar_whose_beginning_can_be_read_in_too_many_ways_is_refused() -> None:
    """The library works out the first row of its parser while it holds the interpreter, and limits it by nothing: with
    1,000 rules of this kind that takes 20 s."""
    rules = "\n".join(f"r{i} ::= r{(i * 7 + 1) % 300} | [a-z ]+ r{(i * 3 + 1) % 300}? | [A-Za-z ]*" for i in range(300))
    endless = ebnf_spec("root ::= " + " | ".join(f"r{i} root" for i in range(300)) + f' | "."\n{rules}')
    built = CachingCompiler("xgrammar", lambda: BYTES, timeout_s=30.0)
    with contextlib.closing(built), pytest.raises(RequestError, match=r"too ambiguous: its beginning|too complex"):
        wait(built.request(endless))


def test_one_mask_of_an_ambiguous_grammar_is_bounded() -> None:
    """With the library's own limit this mask takes seconds."""
    rules = "\n".join(f"r{i} ::= r{(i * 7 + 1) % 60} | [a-z ]+ r{(i * 3 + 1) % 60}? | [A-Za-z ]*" for i in range(60))
    spec = ebnf_spec("root ::= " + " | ".join(f"r{i} root" for i in range(60)) + f' | "."\n{rules}')
    words = tuple(bytes(pair) for pair in itertools.product(b"aBcDe .", repeat=4))
    backend = LLGuidanceBackend(Vocabulary((*words, b""), (len(words),)))
    matcher = backend.load(prepare(spec, "llguidance").spec)()
    with pytest.raises(RequestError, match="limit 10000"):
        matcher.fill(np.zeros(len(words) // 32 + 1, np.int32))


def test_names_of_back_ends() -> None:
    with pytest.raises(SettingsError, match=r"xgrammar, llguidance, outlines-core, outlines"):
        CachingCompiler("antlr", lambda: BYTES)
    CachingCompiler("outlines", lambda: BYTES).close()


def test_a_spec_crosses_processes_unchanged() -> None:
    spec = GrammarSpec("regex", "a")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=GrammarSpec) == spec
