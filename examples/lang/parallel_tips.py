"""Skeleton of thought: short points first, then all points are written out at the same time, and put together."""

from __future__ import annotations

import bough as sgl

POINTS = ["Sleep", "Food", "Movement"]


@sgl.function
def write_tips(s, topic, points):
    s += f"Here are {len(points)} tips on {topic}.\n"
    branches = s.fork(len(points))
    branches += lambda i: f"{i + 1}. {points[i]}: You should"
    branches += sgl.gen("tip", max_tokens=24, stop="\n")
    branches.join()
    for number, (point, tip) in enumerate(zip(points, s["tip"], strict=True), start=1):
        s += f"{number}. {point}: You should{tip}\n"
    s += "In short, you should" + sgl.gen("summary", max_tokens=24, stop="\n")


def main() -> str:
    return write_tips.run("a healthy life", POINTS, temperature=0).text()


if __name__ == "__main__":
    from back_end import chosen_back_end

    with chosen_back_end():
        print(main())
