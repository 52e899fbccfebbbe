"""Attention back ends by name: which run on which device, which one is meant, and how two make one.

Names only; whoever builds an executor brings what makes each back end, since only it has the parts that they need.
Nothing here imports a back end, so this module stays light.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bough.core.errors import SettingsError
from bough.core.settings import ModelSettings

if TYPE_CHECKING:
    from bough.attention.base import AttentionBackend

BACKENDS = {"cpu": ("native", "torch"), "cuda": ("triton", "torch")}  # by kind of device; the first is the default
# Names that users of other engines know.
NOT_SHIPPED = ("flashinfer", "flash_attention", "flash_attention_2", "flash_attention_3", "fa2", "fa3", "fa4")
OTHER_NAMES = {"torch_native": "torch", "sdpa": "torch"}
INSTALL = (
    "nothing can be installed to have more here: triton comes with torch for GPUs, native with `bough build-kernels`"
)
CAPTURABLE = ("triton",)  # needs no lengths on the host, so that its launches can stand in a CUDA graph


@dataclass(frozen=True, slots=True)
class BackendNames:
    """Which back end takes the rows that compute prompt tokens, and which those that decode."""

    prefill: str
    decode: str


def choose_backends(settings: ModelSettings, device_type: str) -> BackendNames:
    """What the settings mean on this kind of device; the two for prefill and decode override the common one."""
    common = _resolve("attention_backend", settings.attention_backend, BACKENDS[device_type][0], device_type)
    return BackendNames(
        prefill=_resolve("prefill_attention_backend", settings.prefill_attention_backend, common, device_type),
        decode=_resolve("decode_attention_backend", settings.decode_attention_backend, common, device_type),
    )


def build_backend(names: BackendNames, makers: Mapping[str, Callable[[], AttentionBackend]]) -> AttentionBackend:
    """The back end of that name, or one that sends decodes to the one and prompts to the other."""
    if names.prefill == names.decode:
        return makers[names.prefill]()
    from bough.attention.split_backend import SplitAttention

    return SplitAttention(prefill=makers[names.prefill](), decode=makers[names.decode]())


def _resolve(setting: str, name: str | None, default: str, device_type: str) -> str:
    if name is None or name == "auto":
        return default
    there = BACKENDS[device_type]
    if (meant := OTHER_NAMES.get(name, name)) in there:
        return meant
    flag = f"--{setting.replace('_', '-')} {name}"
    known = {other for names in BACKENDS.values() for other in names}
    if name in NOT_SHIPPED:
        why = "this version of Bough does not ship that back end"
    elif name in known:
        why = f"that back end does not run on this device ({device_type})"
    else:
        why = "there is no such back end"
    raise SettingsError(f"{flag}: {why}; on this device there is {', '.join(there)}; {INSTALL}.")
