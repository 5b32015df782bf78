"""The database: connections, transactions, errors of drivers, and the version of the schema.

`opening` opens a database for a program. Only `database` begins, commits, rolls back and retries transactions.
`dialects` has the differences between databases, one file per database, and `engines` the code that their connection
pools share. `faults` classifies the drivers' errors. `continuity` detects that a connection leads to another database.
`statements` sends several statements at once, and makes those of many rows; `row_codec` reads and writes rows as values
of a dataclass. `limits` limits a page in bytes, `tables` defines the tables, `schema` migrates them, and `checks`
reports unsafe settings of a database.

The other packages work with a transaction, and never ask which database they use.
"""
