"""OpenAI's protocol: completions, chats, models and responses, with SGLang's extra fields.

`requests` is what clients send and what the engine makes of it, `objects` and `response_objects` are what they get;
`completions`, `chat` and `responses` connect both ends, and `routes` lists what they offer.
"""

from bough.server.openai.routes import routes as routes
