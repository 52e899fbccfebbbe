"""Few-shot questions as a batch: the examples are computed once, all questions share them."""

from __future__ import annotations

import bough as sgl

EXAMPLES = [
    ("What is the capital of Italy?", "Rome"),
    ("Who wrote Hamlet?", "William Shakespeare"),
    ("What is the chemical symbol of gold?", "Au"),
    ("How many legs has a spider?", "Eight"),
]
QUESTIONS = ["What is the capital of France?", "What is the chemical symbol of iron?", "How many legs has a dog?"]


@sgl.function
def few_shot_qa(s, question):
    s += "Answer each question in a few words.\n\n"
    for asked, answer in EXAMPLES:
        s += f"Q: {asked}\nA: {answer}\n\n"
    s += f"Q: {question}\nA:"
    s += sgl.gen("answer", max_tokens=8, stop="\n")


def main() -> str:
    states = few_shot_qa.run_batch([{"question": question} for question in QUESTIONS], temperature=0)
    return "\n".join(f"{question}{state['answer']}" for question, state in zip(QUESTIONS, states, strict=True))


if __name__ == "__main__":
    from back_end import chosen_back_end

    with chosen_back_end():
        print(main())
