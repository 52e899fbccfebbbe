"""Ollama's protocol: chats and completions as lines of JSON, and what there is to know of the model.

`requests` is what clients send and what the engine makes of it, `objects` is what they get, `writing` turns answers
into it; `routes` connects both ends.
"""

from __future__ import annotations

from bough.server.ollama.routes import routes

__all__ = ["routes"]
