"""The routes except those for acks, one module per noun.

A new noun gets a module with its router, which `app` includes. `route` has the classes of all routes, `fields` the
types that their parameters and bodies share, `reply` the responses without a model, and `models` the bodies and
responses of the batch routes. `cursors` encodes the cursors of pages, `long_polls` serves waiting requests, and
`free_json` checks JSON that the service stores for a caller.
"""
