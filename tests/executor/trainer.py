"""A trainer in a process of its own: it joins a group with an engine as SGLang's trainers do, without Bough, and sends
the tensors of a checkpoint as often as a line comes to its input. Arguments: port, world size, file."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

NAME = "weight_update_group"


def main(port: str, world_size: str, file: str) -> None:
    size, tensors, timeout = int(world_size), load_file(file), timedelta(seconds=60)
    store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        size, 0, [], dist.Backend("gloo"), dist.PrefixStore(NAME, store), group_name=NAME, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    print("met", flush=True)
    for _ in sys.stdin:
        for tensor in tensors.values():
            dist.broadcast(tensor, 0, group=group)
        print("sent", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
