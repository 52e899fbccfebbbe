"""The same programs on SGLang's frontend language and on Bough's: only the import differs. Prints what they wrote.

Left out is what does not work in SGLang itself: `concate_and_append` (its server has no such route), and the other two
methods of `select` (they stumble over the empty first logprob).
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

sgl: Any = importlib.import_module(sys.argv[2] if len(sys.argv) > 2 else "sglang")


@sgl.function
def chat(s: Any, question: str) -> None:
    s += sgl.system("You are brief.")
    with s.user():
        s += question
    s += sgl.assistant(sgl.gen("first", max_tokens=10))
    s += sgl.user_begin() + "Why?" + sgl.user_end()
    s += sgl.assistant_begin() + "Because" + sgl.gen("second", max_tokens=10, stop=".") + sgl.assistant_end()


@sgl.function
def tips(s: Any, topic: str) -> None:
    s += f"Tips on {topic}:\n"
    forks = s.fork(2)
    forks += lambda i: f"{i + 1}. You should"
    forks += sgl.gen("tip", max_tokens=8, stop="\n")
    forks.join()
    s += "\n".join(s["tip"]) + "\nIn short:"
    s += sgl.gen("short", max_tokens=8)


def inner(s: Any, word: str) -> None:
    s += f" {word}" + sgl.gen("inner", max_tokens=3)


@sgl.function
def scoped(s: Any) -> None:
    s += "The capital of France"
    with s.var_scope("scope"):
        inner(s, "is")
    s["mine"] = "set"
    with s.copy() as t:
        t += " and" + sgl.gen("aside", max_tokens=3)
        s.set_var("aside", t["aside"])


@sgl.function
def chosen(s: Any) -> None:
    s += "The capital city of France is called"
    s += sgl.select("plain", choices=[" Paris", " London", " Rome"])
    s += ". Two plus two is"
    s += sgl.gen("by_gen", choices=[" four", " nine"], max_tokens=1)


def main() -> None:
    sgl.set_default_backend(sgl.RuntimeEndpoint(sys.argv[1], chat_template_name="chatml"))
    greedy = {"temperature": 0}
    state = chat.run("Who are you?", **greedy)
    streamed = chat.run(question="Who are you?", stream=True, **greedy)
    pieces = "".join(streamed.text_iter())
    batch = tips.run_batch([{"topic": "sleep"}, {"topic": "food"}], num_threads=2, **greedy)
    scope, choice = scoped.run(**greedy), chosen.run(**greedy)
    seen = {
        "chat": [state.text(), state["first"], state["second"], state.messages()],
        "streamed": [pieces, streamed["second"]],
        "batch": [[item.text(), item["tip"], item["short"]] for item in batch],
        "bound": tips.bind(topic="work").run(**greedy).text(),
        "scope": [scope.text(), scope["scope"], scope["inner"], scope["mine"], scope["aside"]],
        "chosen": [choice.text(), choice["plain"], choice["by_gen"]],
    }
    print(json.dumps(seen))


main()
