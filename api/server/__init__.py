"""The layer between a socket and a route.

`upgrades` restricts uvicorn's protocol to HTTP/1.1, and `connection` adds limits to it. `watchdog` enforces time limits
on all connections. `wakeups` hands results of other threads to the event loop. `bodies` reads a request's body,
and `queries` checks the names of its query parameters. `middleware` gives each request its id and its log line.

A limit on clients or connections goes here. The meaning of a request belongs to the routes.
"""
