"""Ollama's protocol: chats and completions as lines of JSON, and what there is to know of the model.

`schema` is what clients send and `objects` what they get; `reading` turns the first into the engine's requests,
`writing` turns answers into the second; `routes` connects both ends.
"""

from __future__ import annotations

from bough.server.ollama.routes import routes

__all__ = ["routes"]
