"""Access: roles, tokens, sessions of the page, and rates.

`rules` declares and checks which callers a route admits. `tokens` reads the tokens that the service accepts, `sessions`
makes and verifies the page's cookie, and `rate_limits` limits the calls and items of each token per second.

A new kind of credential gets its own module, which `rules.Access` calls.
"""
