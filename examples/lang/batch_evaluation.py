"""Many questions rated in parallel branches of one program: `fork`, choices, and a summary."""

from __future__ import annotations

from bough import function, gen

QUESTIONS = ["What is the capital of France?", "Why is the sky blue?", "What?"]


@function
def batch_evaluation(s, questions):
    # Fork parallel evaluation branches
    branches = s.fork(len(questions))
    for i, question in enumerate(questions):
        branches[i] += f"Question: {question}\n"
        branches[i] += "Rating (1-5): "
        branches[i] += gen(f"rating_{i}", max_tokens=1, choices=["1", "2", "3", "4", "5"])
        branches[i] += gen(f"explanation_{i}", max_tokens=50)
    # Merge results
    s += "Summary of all ratings:\n"
    for i, branch in enumerate(branches):
        s += f"{i + 1}. Rating: {branch[f'rating_{i}']}\n"
    return s


def main() -> str:
    return batch_evaluation.run(QUESTIONS, temperature=0).text()


if __name__ == "__main__":
    from back_end import chosen_back_end

    with chosen_back_end():
        print(main())
