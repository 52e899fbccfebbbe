"""The frontend language on LiteLLM's back end. Run with this project on the path, unlike its neighbours."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

import bough as sgl


@sgl.function
def chat(s: Any) -> None:
    s += sgl.system("Be brief.") + sgl.user("Capital?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=9, stop="\n", temperature=0, json_schema={"type": "object"}))


def failure(backend: Any) -> str:
    try:
        chat.run(backend=backend, top_p=5.0)
    except sgl.ProgramError as error:
        return str(error)
    return "not refused"


def main() -> None:
    backend = sgl.LiteLLM("openai/gpt-4o", base_url=f"{sys.argv[1]}/v1", api_key="k")
    state = chat.run(backend=backend)
    streamed = chat.run(backend=backend, stream=True)
    seen = {
        "answer": state["answer"],
        "streamed": "".join(streamed.text_iter("answer")),
        "usage": [state.get_usage().prompt_tokens, state.get_usage().completion_tokens],
        "refused": failure(backend),
    }
    print(json.dumps(seen))


main()
