"""LLM as a judge: several aspects of an essay are judged in parallel branches, and the marks decide."""

from __future__ import annotations

import bough as sgl

ASPECTS = ["clarity", "correctness", "style"]
ESSAY = "Bees are insects. They make honey and carry pollen from flower to flower, and so help plants to grow."


@sgl.function
def judge(s, essay):
    s += sgl.system("You judge short essays.")
    s += sgl.user(f"Essay: {essay}")
    branches = s.fork(len(ASPECTS))
    for branch, aspect in zip(branches, ASPECTS, strict=True):
        branch += sgl.user(f"Judge its {aspect} in one sentence.")
        branch += sgl.assistant(sgl.gen("remark", max_tokens=24, stop="\n"))
        branch += sgl.user(f"Which mark does its {aspect} deserve?")
        branch += sgl.assistant("The mark is " + sgl.select("mark", choices=["good", "fair", "poor"]))
    branches.join()
    s["verdict"] = max(set(s["mark"]), key=s["mark"].count)


def main() -> str:
    state = judge.run(ESSAY, temperature=0)
    judged = zip(ASPECTS, state["mark"], state["remark"], strict=True)
    lines = [f"{aspect}: {mark}: {remark}" for aspect, mark, remark in judged]
    return "\n".join([*lines, f"verdict: {state['verdict']}"])


if __name__ == "__main__":
    from back_end import chosen_back_end

    with chosen_back_end():
        print(main())
