"""The HTTP edge: protocols on top of the engine's client.

A protocol offers `routes(context)`, a list of `Endpoint`s. `app` joins them into one ASGI application; `bodies`,
`streaming` and `errors` are how they read and answer.
"""
