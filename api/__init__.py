"""HTTP for core: routes, bodies, problems. `app` builds it, `python -m api` runs it; no rule of a batch lives here.

The ack routes have ways of their own: `acks` in front of the framework, `protocol` in front of that.
"""
