"""A program that looks at a picture, here one that it draws itself: a red disc on white. It needs a model that sees:

bough serve Qwen/Qwen2.5-VL-3B-Instruct
python examples/multimodal/describe_picture.py http://127.0.0.1:30000
"""

from __future__ import annotations

import struct
import sys
import zlib

import bough as sgl

SIZE, RADIUS = 96, 36


def chunk(name: bytes, data: bytes) -> bytes:
    body = name + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def disc() -> bytes:
    """The picture as a PNG file: each row of pixels has a byte before it that says how it is filtered."""
    rows = b""
    for y in range(SIZE):
        distances = ((x - SIZE // 2) ** 2 + (y - SIZE // 2) ** 2 for x in range(SIZE))
        rows += b"\0" + b"".join(b"\xd0\x20\x20" if d < RADIUS**2 else b"\xff\xff\xff" for d in distances)
    header = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)  # eight bits each of red, green and blue
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@sgl.function
def describe(s, picture):
    s += sgl.user(sgl.image(picture) + "What shape is this, and what colour has it? Answer in a few words.")
    s += sgl.assistant(sgl.gen("answer", max_tokens=32, temperature=0))


def main(address: str) -> str:
    return str(describe.run(disc(), backend=sgl.RuntimeEndpoint(address))["answer"])


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
