"""What SGLang's frontend language sees of a server through its `RuntimeEndpoint`."""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang as sgl
from sglang import RuntimeEndpoint

FRANCE = "The capital of France is"


@sgl.function
def continued(s: Any, start: str) -> None:
    s += start + sgl.gen("rest", max_tokens=8, temperature=0)


@sgl.function
def stopped(s: Any) -> None:
    s += FRANCE + sgl.gen("city", max_tokens=20, temperature=0, stop=".")


@sgl.function
def chosen(s: Any) -> None:
    s += "Question: what is the capital city of France? Answer:"
    s += sgl.select("city", choices=[" Paris", " London", " Rome"])


@sgl.function
def forked(s: Any) -> None:
    s += "Colours are"
    branches = s.fork(2)
    for name, branch in zip((" red", " blue"), branches, strict=True):
        branch += name + sgl.gen("more", max_tokens=4, temperature=0)
    s["both"] = [branch["more"] for branch in branches]


@sgl.function
def chatted(s: Any) -> None:
    s += sgl.system("You are brief.")
    s += sgl.user("Say hello to Ada.")
    s += sgl.assistant(sgl.gen("answer", max_tokens=8, temperature=0))


@sgl.function
def scored(s: Any) -> None:
    s += FRANCE + sgl.gen("rest", max_tokens=2, temperature=0, return_logprob=True, top_logprobs_num=2)


def main() -> None:
    backend = RuntimeEndpoint(sys.argv[1], chat_template_name="chatml")
    sgl.set_default_backend(backend)
    backend.flush_cache()
    streaming = continued.run(start=FRANCE, stream=True)
    pieces = list(streaming.text_iter("rest"))
    forks = forked.run()
    meta = scored.run().get_meta_info("rest")
    seen = {
        "model": backend.get_model_name(),
        "context_length": backend.get_server_info()["context_length"],
        "whole": continued.run(start=FRANCE)["rest"],
        "pieces": pieces,
        "stopped": stopped.run()["city"],
        "chosen": chosen.run()["city"],
        "batch": [s["rest"] for s in continued.run_batch([{"start": FRANCE}, {"start": "Two plus two is"}])],
        "forks": forks["both"],
        "chat": chatted.run()["answer"],
        "logprobs": len(meta["output_token_logprobs"]),
        "top_logprobs": [len(top) for top in meta["output_top_logprobs"]],
    }
    print(json.dumps(seen))


main()
