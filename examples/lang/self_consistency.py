"""Self-consistency: several ways to an answer are drawn at once, and the answer that most of them reach is taken."""

from __future__ import annotations

import re
from collections import Counter

import bough as sgl


@sgl.function
def solve(s, question, ways=4):
    s += f"Question: {question}\nAnswer step by step, then give the number.\nAnswer:"
    s += sgl.gen("ways", n=ways, max_tokens=32, temperature=0.7, stop="\n\n")
    numbers = [found[-1] for way in s["ways"] if (found := re.findall(r"\d+", way))]
    s["votes"] = Counter(numbers)
    s["answer"] = s["votes"].most_common(1)[0][0] if numbers else "unknown"


def main() -> str:
    state = solve.run("There are 3 cars with 4 wheels each. How many wheels are there?")
    return f"{state['answer']} (votes: {dict(state['votes'])})"


if __name__ == "__main__":
    from back_end import chosen_back_end

    with chosen_back_end():
        print(main())
