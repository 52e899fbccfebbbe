"""What the first rank tells the others: the same stream of plans, masks and commands that its own executor gets.

Plans are dataclasses with arrays, which become their type, shape and bytes.
"""

import typing
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bough.core.control import AdapterCommand, GroupCommand, ProfileStart, ProfileStop
from bough.core.plan import BatchPlan, TokenMasks


class LaunchPlan(msgspec.Struct, frozen=True, tag=True):
    plan: BatchPlan


class SupplyMasks(msgspec.Struct, frozen=True, tag=True):
    step: int
    masks: TokenMasks


class RunCommand(msgspec.Struct, frozen=True, tag=True):
    command: GroupCommand | AdapterCommand | ProfileStart | ProfileStop


class CopyPages(msgspec.Struct, frozen=True, tag=True):
    """Of each rank its part: to the first, or from a copy of all parts; or to and from `slots` of its own memory."""

    pages: npt.NDArray[np.int32]  # [n]
    group: int
    content: npt.NDArray[np.uint8] | None = None  # [n, Limits.copied_bytes]; None: the first asks for it
    slots: npt.NDArray[np.int32] | None = None  # [n]
    inward: bool = False  # to the pages


class UseIdleTime(msgspec.Struct, frozen=True, tag=True):
    """Time for a piece of work that was put off."""

    busy: bool = False


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Nothing comes after this."""


ToRank = LaunchPlan | SupplyMasks | RunCommand | CopyPages | UseIdleTime | Leave


def pack_array(value: Any) -> Any:
    """For what msgspec does not know."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to a rank")


def unpack_array(kind: Any, value: Any) -> Any:
    """The inverse, in memory of its own that can be written."""
    assert typing.get_origin(kind) is np.ndarray, kind
    dtype, shape, content = value
    try:
        return np.frombuffer(content, dtype=dtype).reshape(shape).copy()
    except SyntaxError:  # numpy reads some names of types as Python
        raise ValueError(f"{dtype!r} is no type of numbers") from None
