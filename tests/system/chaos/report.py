"""What a run has shown: a table, its JSON and a plot."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from tests.system.chaos.fleet import Fleet
from tests.system.chaos.load import OUTCOMES, Load

MIB = 1 << 20
SPARE_DESCRIPTORS = 16  # connections that are kept for the next request
SPARE_RSS = 1.25  # heaps that have held a burst do not shrink to the byte
SPARE_RSS_MIB = 64


class Record:
    """Times in seconds since its making."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self.faults: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self._baseline: dict[str, tuple[int, float]] = {}

    def now(self) -> float:
        return time.monotonic() - self._begin

    def fault(self, name: str, begin: float, told: str) -> None:
        self.faults.append({"name": name, "begin": begin - self._begin, "end": self.now(), "what": told})

    def baseline(self, fleet: Fleet) -> None:
        self._baseline = largest(fleet)

    def sample(self, fleet: Fleet, load: Load) -> None:
        descriptors = rss = 0
        for _, process in fleet.processes():
            try:
                descriptors += process.num_fds()
                rss += process.memory_info().rss
            except psutil.Error:
                continue
        totals: Counter[str] = Counter()
        for (_, outcome), count in load.outcomes.items():
            totals[outcome] += count
        self.samples.append(
            {"t": self.now(), "descriptors": descriptors, "rss_mib": rss / MIB, "sent": load.sent, **totals}
        )

    def facts(
        self,
        fleet: Fleet,
        load: Load,
        during: Counter[tuple[str, str]],
        sent: int,
        after: Counter[str],
        pages: dict[str, int],
        unsettled: list[str],
    ) -> dict[str, Any]:
        ended = largest(fleet)
        processes = {
            kind: {
                "descriptors": [self._baseline.get(kind, (0, 0.0))[0], ended.get(kind, (0, 0.0))[0]],
                "rss_mib": [round(self._baseline.get(kind, (0, 0.0))[1]), round(ended.get(kind, (0, 0.0))[1])],
            }
            for kind in sorted({*self._baseline, *ended})
        }
        totals: Counter[str] = Counter()
        for (_, outcome), count in during.items():
            totals[outcome] += count
        failures = list(load.notes)
        if sent != sum(totals.values()):
            failures.append(f"{sent} requests were sent and {sum(totals.values())} came to an end")
        failures += [
            f"{count} requests {outcome} after the last fault"
            for outcome, count in after.items()
            if outcome not in ("right", "left by its client")
        ]
        if pages["after"] > pages["before"]:
            failures.append(f"{pages['after']} tokens are held in pages by nobody")
        for kind, of in processes.items():
            if kind not in self._baseline or kind not in ended:
                continue
            if of["descriptors"][1] > of["descriptors"][0] + SPARE_DESCRIPTORS:
                failures.append(f"descriptors of {kind}: {of['descriptors']}")
            if of["rss_mib"][1] > of["rss_mib"][0] * SPARE_RSS + SPARE_RSS_MIB:
                failures.append(f"RSS of {kind} in MiB: {of['rss_mib']}")
        return {
            "failures": failures,
            "notes_before": unsettled,
            "seconds": round(self.now(), 1),
            "sent": sent,
            "totals": {outcome: totals[outcome] for outcome in OUTCOMES},
            "by_kind": {
                kind: {outcome: during[kind, outcome] for outcome in OUTCOMES}
                for kind in dict.fromkeys(case.kind for case in load.cases)
            },
            "after": dict(after),
            "errors": dict(load.errors.most_common(20)),
            "faults": Counter(fault["name"] for fault in self.faults if fault["what"]),
            "not_possible_here": sorted({fault["name"] for fault in self.faults if not fault["what"]}),
            "restarts": fleet.restarts,
            "pages": pages,
            "processes": processes,
        }


def largest(fleet: Fleet) -> dict[str, tuple[int, float]]:
    """Descriptors and RSS in MiB of the largest process of each kind."""
    found: dict[str, tuple[int, float]] = {}
    for kind, process in fleet.processes():
        try:
            descriptors, rss = process.num_fds(), process.memory_info().rss / MIB
        except psutil.Error:
            continue
        held = found.get(kind, (0, 0.0))
        found[kind] = (max(held[0], descriptors), max(held[1], rss))
    return found


def table(facts: dict[str, Any]) -> str:
    lines = ["| requests | sent | " + " | ".join(OUTCOMES) + " |", "|---" * (len(OUTCOMES) + 2) + "|"]
    rows = {**facts["by_kind"], "**all**": facts["totals"]}
    for kind, counts in rows.items():
        cells = " | ".join(str(counts[outcome]) for outcome in OUTCOMES)
        lines.append(f"| {kind} | {sum(counts.values())} | {cells} |")
    lines += ["", "| process | descriptors before, after | RSS before, after (MiB) |", "|---|---|---|"]
    for kind, of in facts["processes"].items():
        lines.append(
            f"| {kind} | {of['descriptors'][0]}, {of['descriptors'][1]} | {of['rss_mib'][0]}, {of['rss_mib'][1]} |"
        )
    lines += ["", "| fault | times |", "|---|---|"]
    lines += [f"| {name} | {count} |" for name, count in sorted(facts["faults"].items())]
    return "\n".join(lines)


def plot(path: Path, record: Record) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    times = [sample["t"] for sample in record.samples]
    figure, (answers, memory, descriptors) = plt.subplots(3, 1, sharex=True, figsize=(10, 7))
    for outcome in OUTCOMES:
        answers.plot(times, [sample.get(outcome, 0) for sample in record.samples], label=outcome)
    answers.set_ylabel("requests")
    answers.legend(fontsize="small", ncols=3)
    memory.plot(times, [sample["rss_mib"] for sample in record.samples])
    memory.set_ylabel("RSS of all, MiB")
    descriptors.plot(times, [sample["descriptors"] for sample in record.samples])
    descriptors.set_ylabel("descriptors of all")
    descriptors.set_xlabel("seconds")
    for axes in (answers, memory, descriptors):
        for fault in record.faults:
            colour = "tab:red" if fault["name"].startswith("SIGKILL") else "tab:gray"
            axes.axvspan(fault["begin"], max(fault["end"], fault["begin"] + 0.5), color=colour, alpha=0.25, lw=0)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def write_report(folder: Path, record: Record, facts: dict[str, Any]) -> None:
    everything = {**facts, "events": record.faults, "samples": record.samples}
    (folder / "chaos.json").write_text(json.dumps(everything, indent=1))
    plot(folder / "chaos.png", record)
    print(table(facts))
    print(f"\npages held by nobody: {facts['pages']['after']}; restarts by the script: {facts['restarts']}")
    for error, count in facts["errors"].items():
        print(f"honest error {count} x: {error}")
    for failure in facts["failures"] or ["none"]:
        print(f"failure: {failure}")
