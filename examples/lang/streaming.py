"""Streaming: the text is read while the program still writes it, as a whole and variable by variable."""

from __future__ import annotations

import bough as sgl


@sgl.function
def story(s, hero):
    s += f"A story about {hero}.\nOnce upon a time"
    s += sgl.gen("beginning", max_tokens=24, stop="\n")
    s += "\nIn the end"
    s += sgl.gen("end", max_tokens=24, stop="\n")


def main(show=lambda piece: None) -> str:
    state = story.run("a small dragon", temperature=0, stream=True)
    pieces = []
    for piece in state.text_iter():
        show(piece)
        pieces.append(piece)
    return "".join(pieces)


if __name__ == "__main__":
    from back_end import chosen_back_end

    with chosen_back_end():
        main(show=lambda piece: print(piece, end="", flush=True))
        print()
