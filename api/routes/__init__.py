"""The routes, a module for each noun, but for acks.

A new noun gets a module with its router, and `app` includes it. `route` is the class of all routes, `models` has the
bodies and answers that several nouns share, `cursors` the places where pages begin, `long_polls` everything that waits,
`free_json` JSON of a caller's own.
"""
