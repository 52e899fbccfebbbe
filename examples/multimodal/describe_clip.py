"""A program that looks at eight frames of a clip, a file or a URL. It needs a model that takes clips:

bough serve Qwen/Qwen2.5-VL-3B-Instruct
python examples/multimodal/describe_clip.py clip.mp4 http://127.0.0.1:30000
"""

from __future__ import annotations

import sys

import bough as sgl


@sgl.function
def describe(s, clip):
    s += sgl.user(sgl.video(clip, 8) + "What happens here? Answer in one sentence.")
    s += sgl.assistant(sgl.gen("answer", max_tokens=64, temperature=0))


def main(clip: str, address: str) -> str:
    return str(describe.run(clip, backend=sgl.RuntimeEndpoint(address))["answer"])


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
