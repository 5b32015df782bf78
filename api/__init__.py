"""HTTP for core: routes, bodies, problems. `app` builds it, `python -m api` runs it; no rule of a batch lives here.
What each request is held to before its route runs is in `routing`; who may call which, in `access`.

The ack routes have ways of their own: `acks` in front of the framework, `protocol` in front of that.
"""
