"""A conversation with roles: the model's own chat template, and each turn computed only once."""

from __future__ import annotations

import bough as sgl


@sgl.function
def multi_turn_chat(s, questions):
    s += sgl.system("You answer in one short sentence.")
    for number, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer_{number}", max_tokens=24))


def main() -> str:
    state = multi_turn_chat.run(["What is the capital of France?", "And what is it known for?"], temperature=0)
    return "\n".join(f"{message['role']}: {message['content']}" for message in state.messages())


if __name__ == "__main__":
    from back_end import chosen_back_end

    with chosen_back_end():
        print(main())
