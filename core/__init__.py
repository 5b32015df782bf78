"""What Lastbit is, without HTTP: the rules of a batch, its bits, its tables and the transactions over them.

`lifecycle` and `bitfield` are pure. `tables` and `db` know the database. `batches`, `acks`, `ranges`, `verify`, `purge`
and `janitor` are operations; each takes the transaction as its argument. `combiner` merges concurrent acks into few
transactions. `service` ties them together and is what `api` and `jobs` call.
"""
