"""`bough doctor`: tells in a page whether Bough will run here, how well, and what to type where it will not.

Exit code 0 when everything needed is there, 1 otherwise. The looking is done in `checkup`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import msgspec

from bough.cli.checkup import Finding, Fit, Machine, Use, look_at_fit, look_at_machine, look_at_use, look_for_missing
from bough.cli.commands import Parser
from bough.cli.flags import add_engine_flags, settings_from
from bough.version import __version__


class Report(msgspec.Struct, frozen=True):
    """All that was found; its JSON form is what `--json` prints."""

    ok: bool
    version: str
    machine: Machine
    use: Use
    fit: Fit
    missing: tuple[Finding, ...]


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        program="bough doctor",
        about="Shows what this machine offers, what an engine with the given flags would use, what would fit, and what "
        "is missing.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON object")
    add_engine_flags(parser)
    parsed = parser.parse(argv)
    settings = settings_from(parsed)
    fit, findings = look_at_fit(settings)
    missing = (*look_for_missing(), *findings)
    ok = not any(finding.needed for finding in missing)
    report = Report(ok, __version__, look_at_machine(), look_at_use(settings), fit, missing)
    print(json.dumps(msgspec.to_builtins(report), indent=2) if parsed.json else "\n".join(_page(report)))
    return 0 if ok else 1


def _page(report: Report) -> Iterator[str]:
    machine, use, fit = report.machine, report.use, report.fit
    yield f"Bough {report.version}"
    yield "\nThis machine"
    yield _line("system", machine.os)
    yield _line("Python", machine.python)
    yield _line("CPU", f"{machine.cpu}, {machine.cores} of {machine.cores_total} cores usable")
    yield _line("memory", f"{_gib(machine.memory_free_bytes)} usable of {_gib(machine.memory_total_bytes)}")
    yield _line("disk", f"{_gib(machine.disk_free_bytes)} free at {machine.home}")
    yield _line("GPU", "; ".join(use.gpus) or "torch sees none")
    yield "\nAn engine would use"
    yield _line("device", f"{use.device}, {use.threads} threads")
    yield _line("numbers", use.dtype)
    yield _line("torch", use.torch or "not installed")
    yield _line("attention", f"{use.attention_backend} back end")
    yield _line("CPU set", use.cpu_instruction_set or "torch's own: the native kernels are not compiled")
    yield f"\nWhat fits: {fit.model}"
    if fit.weight_bytes is not None:
        yield _line("weights", _gib(fit.weight_bytes))
    if fit.kv_tokens is not None and fit.context_length is not None:
        contexts = fit.kv_tokens / fit.context_length
        yield _line("room", f"{fit.kv_tokens:,} tokens, {contexts:.1f} times the context of {fit.context_length:,}")
    yield _line("why", fit.note)
    yield "\nMissing" if report.missing else "\nNothing is missing."
    for finding in report.missing:
        yield f"  {'needed:  ' if finding.needed else 'optional:'} {finding.what}"
        yield f"            → {finding.fix}"


def _line(name: str, value: str) -> str:
    return f"  {name:<10}{value}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
