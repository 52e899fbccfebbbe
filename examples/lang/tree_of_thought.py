"""Tree of thought: each thought branches into several, and the model judges which path is best."""

from __future__ import annotations

import bough as sgl

WAYS = ["First,", "Let us", "We can", "Note that"]


@sgl.function
def tree_of_thought(s, problem, fan_out=2, depth=2, max_tokens=12):
    s += f"Problem: {problem}\nThoughts, step by step:\n"
    leaves = [s]
    for step in range(1, depth + 1):
        grown = []
        for leaf in leaves:
            branches = leaf.fork(fan_out)
            branches += lambda way, step=step: f"{step}. {WAYS[way]}"
            branches += sgl.gen("thought", max_tokens=max_tokens, stop="\n") + "\n"
            grown += branches
        leaves = grown
    for leaf in leaves:  # all leaves are judged at the same time
        leaf += "Is this a good solution? Answer: " + sgl.select("verdict", choices=["yes", "no"])
    marks = [leaf.get_meta_info("verdict")["normalized_prompt_logprobs"][0] for leaf in leaves]
    best = leaves[marks.index(max(marks))]
    s["best"] = best.text()
    s["leaves"] = len(leaves)


def main() -> str:
    return tree_of_thought.run("Share 12 apples among 3 children.", temperature=0)["best"]


if __name__ == "__main__":
    from back_end import chosen_back_end

    with chosen_back_end():
        print(main())
