"""The database: connections, transactions, errors of drivers, and the version of the schema.

`database` begins, commits, rolls back and retries; nothing else does. `dialects` has a file for each database with all
that differs between them, and `engines` what their connection pools have in common. `faults` classifies the drivers'
errors, `continuity` notices that a connection leads to another database, `galera` has what a cluster needs.
`statements` sends several statements at once, `limits` bounds a page in bytes, `schema` migrates, and `checks` reports
what is unsafe about a database.

The other packages work with a transaction, and never ask which database they use.
"""
