"""Anthropic's protocol: messages, whole and streamed, and the count of their tokens."""

from bough.server.anthropic.routes import routes as routes
