"""How engines share a machine."""

from __future__ import annotations

import pytest

from bough.cli.serve import settings_of
from bough.gateway.launching import Machine, share_of

CPU, ONE_GPU, TWO_GPUS = Machine(8), Machine(8, ("0",)), Machine(8, ("0", "1"))


@pytest.mark.parametrize(
    ("machine", "number", "engines", "running", "given", "flags"),
    [
        (CPU, 0, 1, [], [], ["--cpu-threads", "8"]),
        (CPU, 0, 2, [], [], ["--mem-fraction-static", "0.450", "--cpu-threads", "4"]),
        (CPU, 1, 2, [0], [], ["--mem-fraction-static", "0.450", "--cpu-threads", "4"]),
        (CPU, 0, 9, [], ["--max-total-tokens=5"], ["--cpu-threads", "1"]),
        (CPU, 0, 2, [], ["--cpu_threads", "3", "--mem-fraction-static", "0.2"], []),
        (ONE_GPU, 0, 2, [], [], ["--mem-fraction-static", "0.450", "--cpu-threads", "4"]),
        (ONE_GPU, 1, 2, [0], [], ["--mem-fraction-static", "0.900", "--cpu-threads", "4"]),
        (ONE_GPU, 0, 2, [0, 1], [], ["--mem-fraction-static", "0.900", "--cpu-threads", "4"]),
        (TWO_GPUS, 1, 2, [0], [], ["--mem-fraction-static", "0.900", "--cpu-threads", "4"]),
        (TWO_GPUS, 2, 4, [1, 3], [], ["--mem-fraction-static", "0.450", "--cpu-threads", "2"]),
    ],
)
def test_shares(
    machine: Machine, number: int, engines: int, running: list[int], given: list[str], flags: list[str]
) -> None:
    share, environment = share_of(number, engines, running, machine, settings_of(given, {}))
    assert share == flags
    gpus = machine.gpus
    assert environment == ({"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {})
