"""The layer between a socket and a route.

`connection` is uvicorn's protocol with bounds, over `upgrades`, which is HTTP/1.1 alone. `watchdog` looks at all
connections, `bodies` reads a request's body, `middleware` gives each request its id and its log line.

A limit on clients or connections goes here. The meaning of a request belongs to the routes.
"""
