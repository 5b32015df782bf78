"""The two ack routes, which are called once an item, so they bypass the framework.

`routes` is the ASGI application in front of FastAPI, `fast_path` the way through uvicorn's protocol that avoids ASGI.
Under overload `parse_budget` decides which calls are parsed, and `refusals` delays the answers of those that are
refused.

Both ways must give the same answers: a change of one is a change of the other.
"""
