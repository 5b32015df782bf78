"""What Lastbit is, without HTTP: the rules of a batch, its bits, its tables and the transactions over them.

`lifecycle`, `bitfield`, `calls` and `applying` are pure. `tables`, `schema`, `faults` and `db` know the database.
`batches`, `acks` (the bits) with `completion` (the end), `ranges`, `verify`, `purge` and `janitor` are operations; each
takes the transaction as its argument. `statements` sends the hot ones in few packets, `held` keeps bitfields from one
transaction to the next. `combiner`, with `lanes` and `aside`, merges concurrent acks into few transactions, `ticker`
runs background work. `service` ties them together and is what `api` and `jobs` call.
"""
