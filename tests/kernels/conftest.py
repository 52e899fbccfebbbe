"""Where kernels are tested: on the GPU if there is one, else on the CPU (see `tests/conftest.py`)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
