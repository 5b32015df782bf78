"""HTTP for core: routes, bodies, problems. `app` builds it, `python -m api` runs it; no rule of a batch lives here."""
