"""Runs all tests that need a GPU, in processes side by side: `PYTHONPATH=. python tests/system/gpu_suite.py`.

Most of their time is spent on compiling kernels, which a process does one after the other. Tests of one file stay
together where they share engines; those of kernels are dealt out. Prints what each process ended with, what tests
print to be written down, and the end of what failed; ends with 1 if a test failed, did not end in time or did not run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONS = ("-q", "-s", "-o", "addopts=", "-o", "timeout=0", "-p", "no:cacheprovider")
PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", *OPTIONS)
MARK = "mark.gpu"
FIGURES = re.compile(r"agrees? at|logprobs differ")  # what tests print to be written down


@dataclass(frozen=True)
class Share:
    """The tests of one process, and the file that it writes to."""

    name: str
    tests: Sequence[str]
    log: Path

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [*PYTEST, "--tb=short", *self.tests], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )

    def passed(self) -> int:
        found = re.findall(r"(\d+) passed", self.log.read_text(errors="replace"))
        return int(found[-1]) if found else 0


def collect() -> list[str]:
    """From the files that mark tests so: the others may need packages that a GPU machine lacks."""
    files = [str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if MARK in path.read_text()]
    listed = subprocess.run([*PYTEST, "--collect-only", *files], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if listed.returncode:
        sys.exit(f"{listed.stdout}\nThe tests cannot be collected.")
    return [line for line in listed.stdout.splitlines() if "::" in line]


def deal(tests: Sequence[str], processes: int, logs: Path) -> list[Share]:
    """Files of engines one by one, and the rest in equal shares."""
    files: dict[str, list[str]] = {}
    kernels = []
    for test in tests:
        path = test.partition("::")[0]
        if path.startswith("tests/kernels/"):
            kernels.append(test)
        else:
            files.setdefault(path, []).append(test)
    left = min(len(kernels), max(12, processes - len(files)))
    shares = files | {f"kernels {i + 1} of {left}": kernels[i::left] for i in range(left)}
    return [Share(name, tests, logs / f"{i}.txt") for i, (name, tests) in enumerate(shares.items())]


def tell(share: Share, code: int | None) -> None:
    text = share.log.read_text(errors="replace")
    verdict = "did not end in time" if code is None else text.strip().rpartition("\n")[2]
    print(f"{share.name}: {verdict}", flush=True)
    for line in text.splitlines():
        if FIGURES.search(line):
            print(f"  {line.lstrip('.')}", flush=True)
    if code != 0:
        print(text[-4000:], flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="runs all tests that need a GPU")
    parser.add_argument("--processes", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=540, help="after which those that still run are ended")
    parser.add_argument("--leave-out", nargs="+", default=[], metavar="PATH", help="such as tests/kernels")
    asked = parser.parse_args(arguments)
    began, tests = time.monotonic(), [test for test in collect() if not test.startswith(tuple(asked.leave_out))]
    with tempfile.TemporaryDirectory() as folder:
        shares = deal(tests, asked.processes, Path(folder))
        running = [share.start() for share in shares]
        codes: list[int | None] = []
        for process in running:
            try:
                codes.append(process.wait(max(0.1, asked.seconds - (time.monotonic() - began))))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(None)
        for share, code in zip(shares, codes, strict=True):
            tell(share, code)
        passed = sum(share.passed() for share in shares)
    print(f"{passed} of {len(tests)} passed in {time.monotonic() - began:.0f} s with {len(shares)} processes")
    return 0 if passed == len(tests) and not any(codes) and None not in codes else 1


if __name__ == "__main__":
    sys.exit(main())
