"""The layer between a socket and a route.

`upgrades` restricts uvicorn's protocol to HTTP/1.1, `connection` adds `api.limits` to it, and `lingering` closes it so
that refusals arrive. `wakeups` hands results of other threads to the event loop. `bodies` reads a request's body,
and `queries` checks the names of its query parameters. `middleware` gives each request its id and its log line.

The meaning of a request belongs to the routes.
"""
