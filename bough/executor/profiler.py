"""Records what the scheduler process does: torch's profiler, whose traces open in Perfetto or chrome://tracing.

All threads are recorded, because on a CPU the model runs on a thread of its own. Torch is imported with the first
recording: a scheduler whose executor needs none starts without it.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bough.core.control import ProfileStart
from bough.core.errors import RequestError

if TYPE_CHECKING:
    import torch


class TorchProfiler:
    """Owns the recording that is under way, if one is."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None
        self._path = Path()
        self._started = 0

    def start(self, command: ProfileStart) -> None:
        import torch
        from torch.profiler import ProfilerActivity

        known = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA, "CUDA": ProfilerActivity.CUDA}
        names = command.activities or (("CPU", "GPU") if torch.cuda.is_available() else ("CPU",))
        unknown = [name for name in names if name.upper() not in known]
        if unknown:
            raise RequestError(f"activities must be among CPU and GPU, got {unknown[0]!r}.", field="activities")
        activities = {known[name.upper()] for name in names}
        if ProfilerActivity.CUDA in activities and not torch.cuda.is_available():
            raise RequestError("activities: there is no GPU to record; leave it out, or give CPU.", field="activities")
        # Where none is given, a folder of its own: names in the shared one can be guessed, and links laid there.
        folder = _folder(command.output_dir) if command.output_dir else Path(tempfile.mkdtemp(prefix="bough-profile-"))
        self._started += 1  # in the name, because several may begin in one second
        name = f"bough-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._started}.trace.json.gz"
        profile = torch.profiler.profile(
            activities=activities,
            with_stack=command.with_stack,
            record_shapes=command.record_shapes,
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        profile.start()
        self._profile, self._path = profile, folder / name

    def stop(self) -> str:
        assert self._profile is not None
        profile, self._profile = self._profile, None
        profile.stop()
        profile.export_chrome_trace(str(self._path))
        return str(self._path)


def _folder(path: str) -> Path:
    try:
        folder = Path(path).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, RuntimeError) as error:  # a NUL, a lone surrogate, a user that is not there
        raise RequestError(f"output_dir is no path: {str(error).rstrip('.')}.", field="output_dir") from None
    return folder
