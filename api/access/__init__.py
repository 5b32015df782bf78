"""Access: roles, tokens, sessions of the page, and rates.

`rules` has what a route declares about its callers, `tokens` the tokens that the service accepts, `sessions` the page's
cookie, `rate_limits` how much each token may do in a second.

A new kind of credential gets a module of its own, and `rules.Access` asks it.
"""
