"""OpenAI's protocol: completions, chats, models and responses, with SGLang's extra fields.

`schema` is what clients send and `objects` what they get; `limits` and `reading` turn the first into the engine's
requests, `completions`, `chat` and `responses` turn answers into the second (`tools`, `chat_deltas`, `response_items`
and `response_input` where there are calls and thinking); `generation`, `response_routes` and
`models` connect both ends, and `routes` lists what they offer.
"""

from __future__ import annotations

from bough.server.openai.routes import routes

__all__ = ["routes"]
