"""Lastbit without HTTP: the rules of a batch, its bits, its tables and the transactions over them.

There is a package for each noun: `acks`, `batches`, `bits`, `webhooks`, `consumer_groups`, `processes`, `tallies`;
`feed` needs only one file. `storage` is the database under them. `commits` merges concurrent calls into shared
transactions: those of acks are in `acks`, all others in `writes`. `service` puts everything together and is what `api`
and `jobs` call. Most functions take the transaction as their argument; those that need several transactions take the
database.

Two programs work beside the calls, at the intervals of a `ticker`: `dispatcher` sends webhooks and fires timers and
deadlines, `janitor` expires and removes. `errors` lists what can go wrong for a caller. Operators are served by
`explain`, `logs`, `metrics`, `gauges`, `traces` and `settings`.
"""
