"""A trainer in a process of its own: it shares the tensors of a checkpoint on the GPU as often as a line with a number
of bytes (`gather_below`) comes to its input, until the next line. Argument: the file. Prints the path that has the
handles and, at the end, how many bytes torch still holds after all tensors were dropped."""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file

from bough.rl import shared_tensors


def main(file: str) -> None:
    tensors = load_file(file, device="cuda")
    for line in iter(sys.stdin.readline, "end\n"):
        with shared_tensors(tensors, gather_below=int(line)) as path:
            print(path, flush=True)
            sys.stdin.readline()
        print("gone", flush=True)
    tensors.clear()
    torch.cuda.synchronize()
    print(torch.cuda.memory_allocated(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
