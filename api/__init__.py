"""HTTP for core: routes, bodies, problems. `app` builds it, `python -m api` runs it, and `openapi` describes it. No
rule of a batch lives here.

`routes` has one file for each noun; checks that run before every route are in `routes.route`. `access` decides which
callers a route admits. `server` is everything below a route: connections, bodies, middleware. The ack routes are served
separately, in `acks`.
"""
