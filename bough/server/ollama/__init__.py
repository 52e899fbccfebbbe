"""Ollama's protocol: chats and completions as lines of JSON, and what there is to know of the model."""

from bough.server.ollama.routes import routes as routes
