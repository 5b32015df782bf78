"""Access: roles, tokens, and sessions of the page.

`rules` declares and checks which callers a route admits. `tokens` reads the tokens that the service accepts, and
`sessions` makes and verifies the page's cookie.

A new kind of credential gets its own module, which `rules.Access` calls.
"""
