"""Anthropic's protocol: messages, whole and streamed, and the count of their tokens.

`requests` is what clients send and what the engine makes of it, `objects` is what they get, `writing` turns answers
into it, and `routes` connects both ends.
"""

from __future__ import annotations

from bough.server.anthropic.routes import routes

__all__ = ["routes"]
