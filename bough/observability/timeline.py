"""What the scheduler's loop tells of its time: phases on the host, steps on the device.

The loop says what it does whether anybody listens or not. `Silence`, the default, costs a call that does nothing;
`bough.observability.step_trace` writes a file that trace viewers show.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from bough.core.plan import BatchPlan, StepResult


class Timeline(Protocol):
    """Where the loop says what it is doing."""

    def phase(self, name: str, step: int | None = None) -> AbstractContextManager[None]:
        """What happens inside the `with` block; phases may stand inside one another. `step` is the step it is about."""
        ...

    def ran(self, plan: BatchPlan, result: StepResult) -> None:
        """A step is over; the result says when it was on the device."""
        ...


class Silence:
    """Nobody listens."""

    _nothing = nullcontext()

    def phase(self, name: str, step: int | None = None) -> AbstractContextManager[None]:
        return self._nothing

    def ran(self, plan: BatchPlan, result: StepResult) -> None:
        pass
