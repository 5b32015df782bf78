"""Lastbit without HTTP: the rules of a batch, its bits, its tables and the transactions over them.

There is a package for each noun: `acks`, `batches`, `bits`, `webhooks`, `consumer_groups`, `processes`. `storage` is
the database under them. `commits` merges concurrent calls into shared transactions: those of acks are in `acks`, those
of opens, extends, seals and appends in `writes`. `service` puts everything together and is what `api` and `jobs` call.
Most functions take the transaction as their argument; those that need several transactions take the database.
"""
