"""Anthropic's protocol: messages, whole and streamed, and the count of their tokens.

`schema` is what clients send and `objects` what they get; `reading` turns the first into the engine's requests,
`writing` turns answers into the second, and `routes` connects both ends.
"""

from __future__ import annotations

from bough.server.anthropic.routes import routes

__all__ = ["routes"]
