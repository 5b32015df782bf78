"""Charges each line of a file exactly once, wherever it is killed, and however often it is run again. No service runs:

    seq 1 2000 > parcels.txt
    python -m examples.once parcels.txt charges.db

The database is a file of SQLite, which has the charges and, beside them, one bit a line. Both are written in one
transaction. Kill the program at any time, run it again, and count: `sqlite3 charges.db 'SELECT count(*) FROM charges'`.
"""

from __future__ import annotations

import hashlib
import sqlite3
import sys
from pathlib import Path

from lastbit.embedded import Lastbit


def charge(tx: sqlite3.Connection, parcel: str) -> None:
    tx.execute("INSERT INTO charges VALUES (?)", [parcel])


def main(file: str, database: str) -> None:
    lines = Path(file).read_text().splitlines()
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    connection = sqlite3.connect(database)
    connection.execute("CREATE TABLE IF NOT EXISTS charges (parcel TEXT)")
    with Lastbit(f"sqlite:///{database}") as lastbit:
        lastbit.migrate()
        # Under the same key, another run gets the same batch.
        batch = lastbit.client().open(key=file, idempotency_key=digest, items=len(lines), sealed=True)
        charge_once = lastbit.once(charge, using=connection)
        charged = 0
        for item, line in zip(batch.ids, lines, strict=True):
            charged += charge_once(item, line).applied
            if charged and charged % 100 == 0:
                print(f"{charged} charged", flush=True)
        print(f"{charged} charged in this run, {len(lines) - charged} before; the batch is {batch.refresh().state}")
    connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
