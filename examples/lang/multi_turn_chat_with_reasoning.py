"""Reasoning first, the answer after it: two generations in one text."""

from __future__ import annotations

from bough import function, gen


@function
def multi_turn_chat_with_reasoning(s, user_message):
    s += "You are a helpful assistant."
    # Step 1: Generate reasoning
    s += f"User: {user_message}\n"
    s += "Let me think step by step:\n"
    s += gen("reasoning", max_tokens=200, stop="\n\n")
    # Step 2: Generate final answer
    s += "\n\nFinal answer:\n"
    s += gen("answer", max_tokens=100, stop="\n")
    return s


def main() -> str:
    state = multi_turn_chat_with_reasoning.run(
        "A train leaves at 9 and arrives at 11. How long does it take?", temperature=0
    )
    return f"Reasoning:\n{state['reasoning']}\n\nAnswer: {state['answer']}"


if __name__ == "__main__":
    from back_end import chosen_back_end

    with chosen_back_end():
        print(main())
