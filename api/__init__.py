"""The HTTP service around core: routes, bodies, problems. `app` builds it, `python -m api` runs it, and `openapi`
describes it. The rules of batches are in `core`.

`routes` has one file for each noun; checks that run before every route are in `routes.route`. `access` decides which
callers a route admits, and `limits` keeps the process serving. `server` is everything below a route: connections,
bodies, middleware. Acks are served
separately, in `acks`. `fast_path` serves plain requests for acks and for the other verbs that are called most, before
the routes see them. `probe` reads the database for health checks and metrics.
"""
