"""The three ack routes: acks, failures and skips. They are called once per item, so they bypass the framework.

`routes` is the ASGI application in front of FastAPI. `api.fast_path` serves plain requests in uvicorn's protocol,
without ASGI. Both use `queue`, which parses and queues calls in the event loop, `bodies`, which decodes requests and
encodes responses, and `refusals`, which makes the responses to failed calls. `document` describes the routes for
OpenAPI.

Both paths must send the same responses: if you change one, change the other.
"""
