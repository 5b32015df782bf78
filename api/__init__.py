"""HTTP for core: routes, bodies, problems. `app` builds it, `python -m api` runs it; no rule of a batch lives here.
`access` says who may call which route; `routes` has one file for each noun, and what is checked before a route runs is
in `routes.route`. `server` is everything below a route: connections, bodies, middleware.

The ack routes are served apart, in `acks`: `acks.routes` in front of the framework, `acks.fast_path` in front of that.
"""
