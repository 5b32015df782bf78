"""The linters of openapi.yaml: their pinned versions, their rule sets, and the command that runs them."""
