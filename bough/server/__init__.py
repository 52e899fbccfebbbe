"""The HTTP edge: protocols on top of the engine's client.

A protocol module offers `routes(context)`: a list of `Endpoint`s, each of which says once what is needed to route
it, guard it, shape its errors and describe it on the OpenAPI page. `app` joins them into one ASGI application;
`context` is what all of them are given; `bodies`, `streaming` and `errors` are how they read and answer.
"""
