"""The host's memory for cached prefixes (`--enable-hierarchical-cache`): how much, and pinned where a GPU copies."""

import logging
import weakref

import numpy as np
import torch

from bough.core.errors import ResourceError
from bough.core.plan import HostMemory, Limits
from bough.core.settings import Settings
from bough.distributed.group import ALONE, RankGroup
from bough.executor.build import resolve_device
from bough.executor.machine import free_memory_bytes

log = logging.getLogger(__name__)

FREE_SHARE = 0.8  # of the free memory that all replicas of this host may take together


def own_memory(limits: Limits, settings: Settings, group: RankGroup) -> HostMemory:
    """That of one of several ranks, if each has its own share of pages. A store takes whole pages from the first."""
    apart = settings.memory.enable_hierarchical_cache and settings.memory.hicache_storage_backend is None
    return host_memory(limits, settings, group) if apart else []


def host_memory(limits: Limits, settings: Settings, group: RankGroup = ALONE) -> HostMemory:
    """Of each KV group as many times the pages of the device as the settings say, and page 0, which is not used. With a
    group for this rank's share of so many pages as all of them have; else with the parts of all ranks."""
    memory, parallel, shares = settings.memory, settings.parallel, 1
    sizes = [limits.copied_bytes(each) for each in range(len(limits.groups))]
    if group is not ALONE:
        sizes, shares = list(limits.page_bytes), parallel.replica_ranks
    device_bytes = sum(pages * size for pages, size in zip(limits.pages, sizes, strict=True))
    wanted = memory.hicache_size * 1e9 / shares / device_bytes if memory.hicache_size else memory.hicache_ratio
    sharing = max(1, parallel.ranks_per_node * shares // parallel.replica_ranks)
    most = FREE_SHARE * free_memory_bytes() / sharing / device_bytes
    ratio = min(wanted, most)
    # A stage of a pipeline may have none of the layers that share a kind of pages.
    pages = group.minimum([int(count * ratio) if size else 0 for count, size in zip(limits.pages, sizes, strict=True)])
    device_bytes *= shares
    if not all(pages):
        raise ResourceError(
            f"--enable-hierarchical-cache: {ratio * device_bytes / 1e9:.2f} GB of the host's memory do not hold a page "
            "of each kind on every rank, or a stage has none; raise --hicache-size, lower --pp-size, or leave it out."
        )
    buffers = [np.empty((count + 1, size), dtype=np.uint8) for count, size in zip(pages, sizes, strict=True)]
    on_gpu = resolve_device(settings.model).type == "cuda"
    if on_gpu:
        _pin(buffers)
    log.info(
        "memory of the host for cached prefixes: %d tokens, %.2f GB, %.2f times the KV cache%s%s",
        *(pages[0] * limits.page_size, ratio * device_bytes / 1e9, ratio),
        f" (capped: {wanted:.2f} times do not fit into the free memory)" if ratio < wanted else "",
        "" if on_gpu else "; on a CPU it pays little, because a larger --max-total-tokens takes the same memory",
    )
    return buffers


def _pin(buffers: HostMemory) -> None:
    """Lets the GPU copy by itself, until the memory is given back. Registered, because torch's own pinned memory is
    rounded up to a power of two."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for buffer in (each for each in buffers if each.nbytes):
        if error := int(runtime.cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0)):
            log.warning("memory of the host cannot be pinned (CUDA error %d): steps will wait for copies", error)
        else:  # other memory may have these addresses later, and could not be registered
            weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.ctypes.data).atexit = False
