"""What `litellm` sees of a server through its OpenAI provider."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

import litellm

COMMON: dict[str, Any] = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "temperature": 0, "max_tokens": 16}
CHAT: dict[str, Any] = {
    **COMMON,
    "model": "openai/SmolLM2-135M-Instruct",
    "messages": [{"role": "user", "content": "Say hello to Ada."}],
}
TEXT: dict[str, Any] = {
    **COMMON,
    "model": "text-completion-openai/SmolLM2-135M-Instruct",
    "prompt": "The capital of France is",
}


def joined(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def async_chat() -> str:
    stream = await litellm.acompletion(**CHAT, stream=True)
    return joined([chunk async for chunk in stream])


def refused() -> str:
    try:
        litellm.completion(**{**CHAT, "temperature": -1}, num_retries=0)
    except litellm.BadRequestError as error:
        return str(error)
    return "not refused"


def main() -> None:
    whole = litellm.completion(**CHAT)
    chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
    seen = {
        "chat": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "streamed": joined(chunks),
        "streamed_usage": [[c.usage.prompt_tokens, c.usage.completion_tokens] for c in chunks if hasattr(c, "usage")],
        "pieces": len(chunks),
        "async_streamed": asyncio.run(async_chat()),
        "text": litellm.text_completion(**TEXT).choices[0].text,
        "text_streamed": "".join(
            chunk.choices[0].text or "" for chunk in litellm.text_completion(**TEXT, stream=True) if chunk.choices
        ),
        "refused": refused(),
    }
    print(json.dumps(seen))


main()
